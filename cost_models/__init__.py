"""autopar: cost_models."""
