"""The kernel `cast`."""
