"""Servers that all nodes reach: which, how they are reached, and those that a node runs itself."""
