"""The command line: ``quaver demo`` and its siblings."""
