"""The intermediate representation: programs of one step, their simplification and their derivatives."""
