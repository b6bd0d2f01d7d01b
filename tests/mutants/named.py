"""Faults that once survived every test, each with the tests that must notice it.

Each entry is (file, text that occurs once in it, replacement, test files).
"""

_DATA, _OURS = "tests/unit/data_pipeline", "tests/unit/kimi_pretrain"

NAMED: list[tuple[str, str, str, tuple[str, ...]]] = [
    (
        "kimi_pretrain/engine/microbatch.py",
        "cells = np.where(loss_mask, cells_of(plan, rows), -1)",
        "cells = np.where(batch.rows.loss_mask[local], cells_of(plan, rows), -1)",
        ("tests/dist/test_positions.py",),
    ),
    (
        "kimi_pretrain/dep/bubble_run.py",
        "shared.grad = leaf.grad[:start]",
        "pass",
        ("tests/dist/test_positions.py",),
    ),
    (
        "kimi_pretrain/memory/saved.py",
        "return output if _place(output) == self.place else output.as_strided(*self.place)",
        "return output if _place(output) == self.place else output.reshape(self.place[0])",
        (f"{_OURS}/memory/test_saved.py",),
    ),
    (
        "kimi_pretrain/memory/fp8_tiles.py",
        "clamp(min=_SMALLEST_SCALE)",
        "clamp(min=_SMALLEST_SCALE, max=torch.finfo(torch.float32).max)",
        (f"{_OURS}/memory/test_fp8_tiles.py",),
    ),
    (
        "kimi_pretrain/memory/saved.py",
        "whole = torch.empty(0, dtype=self.dtype, device=tensor.device)\n"
        "        whole.set_(tensor.untyped_storage(), 0, self.shape)",
        "whole = tensor.reshape(self.shape)",
        (f"{_OURS}/memory/test_saved.py",),
    ),
    (
        "kimi_pretrain/tools/validation.py",
        "float(self.table.loss.sum()) / tokens if tokens",
        "float(self.table.loss.sum()) / self.text_tokens if tokens",
        ("tests/dist/test_resume.py",),
    ),
    (
        "kimi_pretrain/train.py",
        "validated = _validate_if_due(run, recorder, watchdog, stop)",
        "validated = True",
        ("tests/dist/test_resume.py",),
    ),
    (
        "kimi_pretrain/run.py",
        "planner.tombstones = mesh.broadcast_from_rank0(lambda: planner.tombstones)",
        "pass",
        ("tests/dist/test_change_data.py", "tests/dist/test_resume.py"),
    ),
    (
        "kimi_pretrain/tools/exposure.py",
        "found.heldout, found.untold = _held_out(run_dir, store, there)",
        "found.heldout, found.untold = [], []",
        (f"{_OURS}/tools/test_exposure.py",),
    ),
    (
        "kimi_pretrain/tools/exposure.py",
        "int(table.part[at])",
        "0",
        (f"{_OURS}/tools/test_exposure.py",),
    ),
    (
        "kimi_pretrain/tools/exposure.py",
        "int(table.epoch[at])",
        "0",
        (f"{_OURS}/tools/test_exposure.py",),
    ),
    (
        "data_pipeline/plan/tombstones.py",
        "since_of(where, redactions, names, redacted))",
        "((0, tuple(map(len, redacted))),))",
        (f"{_OURS}/tools/test_exposure.py",),
    ),
    (
        "kimi_pretrain/tools/exposure.py",
        "return began | (history and {key: here[key] for key in _DATA} | history)",
        "return here | history",
        (f"{_OURS}/tools/test_exposure.py",),
    ),
    (
        "data_pipeline/plan/stage.py",
        "return dict(state), None",
        'return dict(state) | {"quarantine": []}, None',
        (f"{_DATA}/test_token_budget.py", f"{_DATA}/test_quarantine_rules.py"),
    ),
    (
        "data_pipeline/plan/tombstones.py",
        "np.concatenate([np.ones(min(len(rows), 1), np.bool_), ~same])",
        "np.concatenate([~same, np.ones(min(len(rows), 1), np.bool_)])",
        (f"{_DATA}/test_tombstones.py",),
    ),
    (
        "data_pipeline/index/redacted.py",
        "in sorted(set(spans)):",
        "in sorted(set(spans))[:1]:",
        (f"{_DATA}/test_redact.py",),
    ),
    (
        "data_pipeline/index/shared.py",
        'redacted=tuple(redacted.get("samples", ()))',
        "redacted=()",
        (f"{_DATA}/test_shared_index.py",),
    ),
    (
        "data_pipeline/index/shared.py",
        'made_as=redacted.get("made_as", "")',
        'made_as=""',
        (f"{_DATA}/test_shared_index.py",),
    ),
    (
        "data_pipeline/govern/redact.py",
        "if key in holds:",
        "if False:",
        (f"{_DATA}/test_redact.py", "tests/fault/test_redact_s3.py"),
    ),
    (
        "data_pipeline/govern/holds.py",
        "if on or key not in stays]",
        "]",
        (f"{_DATA}/test_redact.py", "tests/fault/test_redact_s3.py"),
    ),
    (
        "data_pipeline/govern/collect.py",
        'thing.kind in ("unfinished", "source")',
        'thing.kind == "source"',
        (f"{_DATA}/test_collect.py",),
    ),
    (
        "data_pipeline/catalog/runs.py",
        'RUN.c.state != "finished"',
        'RUN.c.state.not_in(["finished", "stopped"])',
        (f"{_DATA}/test_catalog.py", "tests/unit/launch/test_catalog_command.py"),
    ),
    (
        "data_pipeline/sync/survey.py",
        "digest_of(item, info.etag) in self._noted",
        "self._noted",
        (f"{_DATA}/test_sync.py", "tests/fault/test_sync.py"),
    ),
    (
        "data_pipeline/sync/sync.py",
        "{one.contents.name, *(item.folder for item in one.missing if item in shards)}",
        "{one.contents.name}",
        (f"{_DATA}/test_sync.py", "tests/fault/test_sync.py"),
    ),
    (
        "data_pipeline/inspect/facts.py",
        "whole = sample_fingerprint(index)",
        "whole = index.json_crc.astype(np.uint64)",
        (f"{_DATA}/test_facts.py", "tests/unit/launch/test_facts_command.py"),
    ),
    (
        "data_pipeline/inspect/count.py",
        'by_fate.get("removed", none)[2]',
        "0",
        (f"{_DATA}/test_facts.py", "tests/unit/launch/test_facts_command.py"),
    ),
]
