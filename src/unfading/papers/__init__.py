"""Every table and figure of the three papers as a function; see `registry`."""
