"""What is run beside training: predictions, calibration, dry runs, evaluation, plots, reports."""
