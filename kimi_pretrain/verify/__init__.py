"""What `kimi-pretrain verify` compares, and what the ranks of its jobs do (`launch.verify` starts
them): `result`, `fault`, `configs` and `shrink` serve both verifications.

`verify dep`: `dep` is what its ranks do, `dep_files` and `routes` are the files they leave,
`dep_compare` compares them, `dep_faults` are its faults.

`verify resume`: `resume` is what its ranks do, `traces` reads what they leave, `resume_compare`
compares it, `resume_faults` are its faults.
"""
