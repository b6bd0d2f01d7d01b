"""Plants one-line faults in our code and lists those that no test notices (`make mutants`)."""
