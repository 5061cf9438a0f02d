"""Ways to start an emitted package; one file each."""
