"""Every table and figure of the papers as a function; see `registry`."""
