"""How a pattern is executed: one attention call that keeps its log-sum-exp, all pairs with a mask, or only those kept."""
