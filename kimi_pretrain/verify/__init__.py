"""Comparisons of `kimi-pretrain verify`, and the work of the ranks that `launch.verify` starts.

`result`, `fault`, `configs` and `shrink` serve both verifications.

`verify dep`: `dep` runs on the ranks, `dep_files` and `routes` define the files that they write,
`dep_compare` compares the files, and `dep_faults` holds the faults.

`verify resume`: `resume` runs on the ranks, `traces` reads their output, `resume_compare` compares
it, and `resume_faults` holds the faults.
"""
