"""What Quaver costs, measured on request; a timing is never a test."""
