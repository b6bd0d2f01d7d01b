"""Tools around training: predictions, calibration, dry runs, evaluation, plots, reports."""
