"""Published training runs -> predictions by the planner's own evaluator, and how far off they are."""
