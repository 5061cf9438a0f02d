"""Parts of cpu_predicted_vs_measured.py."""
