"""Maps a rank's stack dump to the phase of the step it was in; see `site/sitecustomize.py`."""

import re

# The innermost frame with a known name determines the phase: (end of the file name, function,
# phase). An empty function matches any.
PHASES: tuple[tuple[str, str, str], ...] = (
    ("checkpoint/saver.py", "begin", "copying aside for a save"),
    ("checkpoint/saver.py", "finish", "waiting for a save's end"),
    ("checkpoint/saver.py", "", "saving"),
    ("checkpoint/load.py", "", "loading the checkpoint"),
    ("checkpoint/find.py", "", "verifying the checkpoint"),
    ("checkpoint/hashes.py", "", "hashing its final state"),
    ("optim/newton_schulz.py", "", "optimizer"),
    ("optim/muon.py", "", "optimizer"),
    ("optim/muonclip.py", "", "optimizer"),
    ("optim/broadcast.py", "", "optimizer, sending updates"),
    ("optim/reduce.py", "", "gradient sum"),
    ("kimi_pretrain/update.py", "", "optimizer"),
    ("dep/reduce.py", "", "gradient sum"),
    ("dep/exchange.py", "hand_over", "hand-over"),
    ("dep/exchange.py", "hand_back", "hand-back"),
    ("dep/encoder.py", "forward", "vision forward"),
    ("dep/encoder.py", "backward", "vision backward"),
    ("dep/encoder.py", "begin", "vision forward"),
    ("pipeline_parallel/schedules.py", "backward_step", "backbone, backward"),
    ("pipeline_parallel/schedules.py", "backward_step_helper", "backbone, backward"),
    ("pipeline_parallel/schedules.py", "forward_step", "backbone, forward"),
    ("pipeline_parallel/schedules.py", "forward_step_helper", "backbone, forward"),
    ("p2p_communication.py", "", "backbone, waiting for another stage"),
    ("engine/backbone.py", "_forward", "backbone, forward"),
    ("engine/backbone.py", "train_step", "backbone"),
    ("kimi_pretrain/step.py", "_pixels", "prepare"),
    ("kimi_pretrain/step.py", "_report", "update"),
    ("data_pipeline/loader.py", "", "waiting for data"),
    ("kimi_pretrain/engine/microbatch.py", "", "prepare"),
    ("kimi_pretrain/step.py", "", "prepare"),
    ("telemetry/", "", "measuring"),
    ("kimi_pretrain/reliability/run_files.py", "", "writing metrics"),
    ("kimi_pretrain/telemetry/run_dir.py", "", "writing metrics"),
    ("kimi_pretrain/train.py", "_train_steps", "between steps"),
    ("engine/mesh.py", "all_gather_object", "gather between steps"),
    ("kimi_pretrain/train.py", "", "starting"),
    ("launch/local/worker.py", "", "starting"),
)

_FRAME = re.compile(r'  File "([^"]+)", line \d+ in (\S+)')


def phase_of(dump: str) -> str:
    """Return the phase of a thread, given its dump by faulthandler.

    The innermost known frame decides.
    """
    frames = _FRAME.findall(dump)
    for file, function in frames:
        for ending, name, phase in PHASES:
            known = ending in file if ending.endswith("/") else file.endswith(ending)
            if known and name in ("", function):
                return phase
    return "starting" if frames else "before Python had begun"
