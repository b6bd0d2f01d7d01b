"""What `kimi-pretrain verify` compares, and what the ranks of its jobs do; `launch.verify` starts
them and prints.

Both verifications: `result` (comparison, verdict), `fault` (what can be planted), `configs` (of the
jobs), `shrink` (a copy of a configuration that is small enough for this machine).

`verify dep`: `dep` is what its ranks do, `gradients` and `routes` are the files they leave,
`dep_compare` compares them, `dep_faults` are its faults.

`verify resume`: `resume` is what its ranks do, `traces` reads what they leave, `resume_compare`
compares it, `resume_faults` are its faults.
"""
