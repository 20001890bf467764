"""How a pattern is executed: all pairs with a mask, or only those that are kept."""
