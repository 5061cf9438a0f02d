"""autopar: cost_models/hardware."""
