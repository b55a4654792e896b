"""Where scores come from."""
