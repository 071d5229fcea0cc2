"""The kernel `current_cast`."""
