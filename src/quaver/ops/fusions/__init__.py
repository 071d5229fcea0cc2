"""What operations become when they are computed together, and the rules that say which."""
