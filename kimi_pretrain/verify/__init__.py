"""Proofs that the user runs on a configuration of their own (`kimi-pretrain verify ...`).

`verify dep`: `compare` says how far two runs of one step are apart, `gradients` keeps gradients in
files, `jobs` says which two runs are compared, `dep` is what each of their processes does, `faults`
plants faults that the comparison must find.

`verify resume`: `resume` and `resume_layout` compare what runs left behind (`trace`), `findings`
tells it to a person, `resume_jobs` says which runs are compared, `resume_runs` and `watch` are what
their processes do, `resume_faults` plants faults, `order` puts tensors in the model's order.

`shrink` makes a configuration small enough for this machine.
"""
