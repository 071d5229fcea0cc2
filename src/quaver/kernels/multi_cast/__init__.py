"""The kernel `multi_cast`."""
