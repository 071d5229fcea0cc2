"""Fused modules in the place of a norm and what it feeds: recognized, swapped in, taken apart."""
