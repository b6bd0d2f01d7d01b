"""Proofs that the user runs on a configuration of their own (`kimi-pretrain verify ...`).

`compare` says how far two runs of one step are apart, `gradients` keeps gradients in files, `jobs`
says which two runs are compared, `dep` is what each of their processes does, `faults` plants faults
that the comparison must find, and `shrink` makes a configuration small enough for this machine.
"""
