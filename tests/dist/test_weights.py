"""Exported and imported weights against transformers' own classes: the same logits, in fp32.

The engine runs in a separate process. transformers builds DeepSeek-V3's two latent norms with an
epsilon of 1e-6 whatever the configuration says. The engine (like Megatron-Core, vLLM and SGLang)
uses the configured epsilon. With norm_eps=1e-6 both agree; with 1e-5 they differ by about 1e-5.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from data_pipeline.text import NUM_SPECIAL, train_ranks
from kimi_pretrain.weights import hf_export
from kimi_pretrain.weights.weight_reader import open_weights
from tests import ROOT, docs, fork_server
from tests.dist.deepseek import deepseek_v3
from tests.dist.jobs import SMALL, layout, run_jobs
from tests.dist.weights_case import BORDERS, GRID, inputs
from tests.later import Later
from tests.unit.data_pipeline.media import encoded
from tests.unit.kimi_pretrain.weights.weight_folders import random_weights, with_int4

transformers = Later("transformers")
pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

TOLERANCE = 1e-5  # relative to the largest logit
YARN = "model.language.yarn={factor: 4.0, original_max_position: 32, beta_fast: 4.0}"


@dataclass(frozen=True)
class Case:
    """A model and the origin of its weights."""

    name: str
    overrides: tuple[str, ...]
    latent_eps: float = 1e-6


# The projector of Kimi's architecture is four towers wide, and so is SMALL's.
LATENT = Case(
    "latent, YaRN",
    (YARN, "model.language.norm_eps=1.0e-5", "model.language.rope_theta=300.0"),
    1e-5,
)
PLAIN = Case(
    "no query latent, no YaRN",
    (
        "model.language.q_lora_rank=null",
        "model.language.norm_eps=1.0e-6",
        "model.language.rope_theta=50000.0",
        "model.language.num_shared_experts=2",
        "model.language.num_dense_layers=2",
    ),
)
CASES = (LATENT, PLAIN)


def config_of(case):
    """Return the configuration of a case, as the job has it."""
    from kimi_pretrain.config import load_config

    return load_config("tiny_cpu", [*SMALL, *layout(), *case.overrides])


def deepseek_of(language):
    """Return transformers' model in a language model's sizes, with random weights."""
    config = transformers.DeepseekV3Config(**deepseek_v3(language, 128))
    model = transformers.DeepseekV3ForCausalLM(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("bias"):
                tensor.copy_(noise.abs())
            else:
                tensor.copy_(1 + 0.2 * noise if tensor.ndim == 1 else 0.06 * noise)
    return model


@pytest.fixture(scope="module")
def work(data_root, tmp_path_factory):
    """Source folders, the engine's results by name, and transformers' models."""
    folder = tmp_path_factory.mktemp("weights")
    jobs = {}

    def job(name, case, *overrides):
        data = (f"data.root={data_root}", *layout(), *case.overrides)
        jobs[name] = "weights_logits", (*data, *overrides)

    theirs = {}
    for case in CASES:
        job(f"ours: {case.name}", case, f"checkpoint.place={folder / case.name}")
        theirs[case.name] = deepseek_of(config_of(case).model.language)
        theirs[case.name].save_pretrained(folder / f"theirs {case.name}")
        job(f"theirs: {case.name}", case, f"train.start_from={folder / f'theirs {case.name}'}")
    released = write_released(folder / "released")
    for kind in released:
        job(f"released: {kind}", LATENT, f"train.start_from={folder / 'released' / kind}")
    found = run_jobs(jobs, folder / "job", 1, timeout=200)
    return folder, found, theirs


def write_released(folder: Path) -> tuple[str, ...]:
    """Write weights under K2.5's released names: INT4 experts, and equal numbers in float32."""
    config = config_of(LATENT)
    # A tenth of the size, like the numbers of a trained model.
    weights = {n: 0.1 * t + (t.ndim == 1) * 0.9 for n, t in random_weights(config).items()}
    stored, meant = with_int4(weights)
    meant = {name: tensor.float() for name, tensor in meant.items()}
    for kind, tensors in (("int4", stored), ("float32", meant)):
        (folder / kind).mkdir(parents=True)
        save_file(tensors, folder / kind / "model.safetensors", {"format": "pt"})
    return "int4", "float32"


def distance(ours, theirs) -> float:
    """Return the largest difference, relative to the largest logit."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def logits_of(model, documents, pad=None, latent_eps=1e-6):
    """Return logits of each document alone; the image replaces its pads."""
    tokens, patches, _ = inputs(768)
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = latent_eps
    pixels, out = (patches.float() / 255 - 0.5) / 0.5, []
    for number in documents:
        part = tokens[:, BORDERS[number] : BORDERS[number + 1]]
        media = {}
        if pad is not None and bool((part == pad).any()):
            media = {"pixel_values": pixels, "image_grid_thw": torch.tensor([GRID])}
        with torch.no_grad():
            out.append(model(part, **media).logits)
    return torch.cat(out, 1)


def exported(folder, case, kind, **options):
    """Export the job's checkpoint; return the folder."""
    out = folder / f"{case.name} as {kind}"
    if not out.exists():
        chosen = hf_export.ExportOptions(kind, file_bytes=200_000, **options)
        hf_export.export(hf_export.plan(folder / case.name, chosen), out, chosen)
    return out


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_export_computes_the_same_in_deepseek_v3(work, case):
    folder, found, _ = work
    out = exported(folder, case, "deepseek_v3")
    model, told = transformers.DeepseekV3ForCausalLM.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    assert not any(told.values()), told
    ours = found[f"ours: {case.name}"]["logits"][:, : BORDERS[2]]
    assert distance(ours, logits_of(model, (0, 1), latent_eps=case.latent_eps)) <= TOLERANCE
    # The shipped model has the other epsilon in its latent norms.
    assert distance(ours, logits_of(model, (0, 1))) <= 1e-4


def test_an_export_generates_text_as_the_documentation_shows(work, capsys):
    folder, _, _ = work
    out = exported(folder, LATENT, "deepseek_v3")
    page = (ROOT / "docs" / "WEIGHTS.md").read_text()
    (out / "tiktoken.model").write_bytes(train_ranks([page], 768 - NUM_SPECIAL))
    found = docs.run("docs/WEIGHTS.md", {'"wide': f'"{out}'})
    assert capsys.readouterr().out.startswith("[BOS]The loader reads")
    ids, length = found["ids"], found["prompt"].shape[1]
    assert length < ids.shape[1] <= length + 20
    with torch.no_grad():  # each token is the most likely one after its predecessors
        logits = found["model"](ids[:, :-1]).logits
    assert torch.equal(logits.argmax(-1)[:, length - 1 :], ids[:, length:])


def test_an_export_computes_the_same_in_kimi_k25_with_an_image(work):
    folder, found, _ = work
    out = exported(folder, LATENT, "kimi_k25")
    model, told = transformers.Kimi_K25ForConditionalGeneration.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    assert not any(told.values()), told
    ours = found[f"ours: {LATENT.name}"]["logits"]
    theirs = logits_of(model, (0, 1, 2), pad=768 - 256 + 21, latent_eps=1e-5)
    assert distance(ours, theirs) <= TOLERANCE
    assert distance(ours[:, BORDERS[2] :], theirs[:, BORDERS[2] :]) <= TOLERANCE


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_their_saved_weights_compute_the_same_here(work, case):
    _, found, theirs = work
    model = theirs[case.name].eval()
    ours = found[f"theirs: {case.name}"]["logits"][:, : BORDERS[2]]
    assert distance(ours, logits_of(model, (0, 1), latent_eps=case.latent_eps)) <= TOLERANCE


def test_released_names_and_int4_are_read(work):
    """INT4 experts equal their float32 values, which transformers loads too."""
    folder, found, _ = work
    int4, plain = (found[f"released: {kind}"]["logits"] for kind in ("int4", "float32"))
    assert torch.equal(int4, plain)
    written = json.loads((exported(folder, LATENT, "kimi_k25") / "config.json").read_text())
    (folder / "released" / "float32" / "config.json").write_text(json.dumps(written))
    model = transformers.Kimi_K25ForConditionalGeneration.from_pretrained(
        folder / "released" / "float32", dtype=torch.float32
    )
    theirs = logits_of(model, (0, 1, 2), pad=768 - 256 + 21, latent_eps=1e-5)
    assert distance(plain, theirs) <= TOLERANCE


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_names_shapes_and_types_are_those_of_the_engine(work, case):
    from kimi_pretrain.weights.hf_import import dtype_of
    from kimi_pretrain.weights.shapes import model_shapes

    _, found, _ = work
    config, held = config_of(case), found[f"ours: {case.name}"]
    shapes = {name: list(shape) for name, shape in model_shapes(config.model).items()}
    assert shapes == held["shapes"]
    assert {name: str(dtype_of(name, config)) for name in shapes} == held["dtypes"]


FOUR = layout(pp=2, vpp=2, dp=2, ep=2)
TENSOR_PARALLEL = (*layout(pp=2, ep=2), "layout.tp=2")


def test_ranks_of_any_layout_start_with_the_weights_and_nothing_else(data_root, tmp_path):
    """Masters are kept where they exist; moments, steps and the loader start fresh."""
    place, plain = tmp_path / "trained", tmp_path / "plain"
    plain.mkdir()
    weights = random_weights(config_of(LATENT))
    weights = {name: tensor for name, tensor in weights.items() if "language_model." in name}
    save_file(weights, plain / "model.safetensors")
    trained = f"train.start_from={place / 'step_00000002'}"

    def job(action, dtype, *overrides):
        return action, (f"data.root={data_root}", f"train.dtype={dtype}", *overrides)

    jobs = {
        "train": job("weights_trained", "bfloat16", *FOUR, f"checkpoint.place={place}"),
        "tensor parallel": job("weights_started", "bfloat16", *TENSOR_PARALLEL, trained),
        "wider": job("weights_started", "float32", *FOUR, trained),
        "language alone": job("weights_started", "bfloat16", *FOUR, f"train.start_from={plain}"),
    }
    found = run_jobs(jobs, tmp_path / "job", 4, timeout=200)
    for name in ("tensor parallel", "wider", "language alone"):
        ranks = found[name]["ranks"]
        wrong = sorted({tensor for rank in ranks for tensor in rank["wrong"]})
        if name == "language alone":  # the encoder keeps its initial values from the seed
            wrong = [tensor for tensor in wrong if "language_model." in tensor]
        assert not wrong, (name, wrong[:3])
        assert sum(rank["moments"] for rank in ranks) == 0
        assert found[name]["steps"] == (0, 0, 0)
        assert bool(sum(rank["masters"] for rank in ranks)) == (name != "wider")
    masters = open_weights(place / "step_00000002")
    told = [masters.read(n) for n in masters.headers if n.startswith("optim.master.")]
    assert any(not torch.equal(t, t.bfloat16().float()) for t in told), "masters say no more"


# Evaluation ---------------------------------------------------------------------------------------

BOOK = " ".join(f"page {i}: the cat sat on a mat and saw {i % 10} red kites." for i in range(60))


def held_out(data_root: Path, root: Path):
    """Write sources of texts and pictures; return the corpus's tokenizer and the texts' ids."""
    from data_pipeline.ingest.ingest import CrudeSample, ImageSegment, TextSegment, ingest
    from data_pipeline.store.open import open_store
    from data_pipeline.text import Tokenizer

    store = open_store(str(root))
    (root / "tokenizer.tiktoken").write_bytes((data_root / "tokenizer.tiktoken").read_bytes())
    tokenizer = Tokenizer.from_store(store, "tokenizer.tiktoken")

    def picture(side: int = 56) -> ImageSegment:
        return ImageSegment(encoded(np.full((side, side, 3), side, np.uint8)), "png")

    texts = [[TextSegment("a cat sat"), TextSegment(" on a mat", False)], [TextSegment(BOOK)]]
    digits = [
        [picture(28 * i), TextSegment("see 4", False), TextSegment(f" read {i}7")] for i in (1, 2)
    ]
    others = [[picture(), TextSegment("no number")], [picture(), picture(), TextSegment("8")],
              [picture(), TextSegment(BOOK)], *texts]  # fmt: skip
    for name, samples in (("texts", texts), ("mixed", digits + others), ("bare", others[:1])):
        crude = [CrudeSample(f"{name}-{i}", segments) for i, segments in enumerate(samples)]
        ingest(crude, store, name, tokenizer, 1 << 16, category="text")
    return tokenizer, [[tokenizer.encode(part.text) for part in text] for text in texts]


EVALUATE = """
import json, sys
from typer.testing import CliRunner
from launch.cli.main import app
from launch.local.worker import leave
for arguments in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, ["eval", *arguments])
    told = done.stdout.splitlines()[-1:] or [""]
    print(json.dumps([done.exit_code, told[0], done.stderr]), flush=True)
leave(0)
"""


def test_an_evaluation_counts_what_it_says(work, data_root, tmp_path):
    """Whole texts, some longer than a microbatch, against transformers; omissions are counted."""
    folder, _, _ = work
    tokenizer, texts = held_out(data_root, tmp_path)
    (step,) = (folder / PLAIN.name).iterdir()
    given = ("--config", "tiny_cpu", "--checkpoint", str(step), "--json", *SMALL, *layout(),
             *PLAIN.overrides, f"data.root={tmp_path}")  # fmt: skip
    runs = [["--source", "texts"], ["--source", "mixed"], ["--source", "mixed", "--texts"],
            ["--source", "bare"], ["--source", "bare", "--texts"]]  # fmt: skip
    asked = json.dumps([[*run, *given] for run in runs])
    done = fork_server.run(["-c", EVALUATE, asked], 200)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert [code for code, _, _ in found] == [0, 0, 0, 2, 2], found
    of_texts, of_pictures, of_both = (json.loads(line) for _, line, _ in found[:3])

    model = transformers.DeepseekV3ForCausalLM.from_pretrained(
        exported(folder, PLAIN, "deepseek_v3"), dtype=torch.float32
    )
    (said, unsaid), (book,) = texts
    parts = [([tokenizer.bos, *said, *unsaid, tokenizer.eos], [1] * len(said) + [0] * len(unsaid))]
    pieces = [book[i : i + 126] for i in range(0, len(book), 126)]
    parts += [([tokenizer.bos, *piece, tokenizer.eos], [1] * len(piece)) for piece in pieces]
    total = tokens = 0
    for number, (ids, learnt) in enumerate(parts):
        last = number in (0, len(parts) - 1)
        mask = torch.tensor([False, *map(bool, learnt), last])
        labels = torch.where(mask, torch.tensor(ids), -100)
        with torch.no_grad():
            mean = model(torch.tensor([ids]), labels=labels[None]).loss
        total, tokens = total + float(mean) * int(mask.sum()), tokens + int(mask.sum())
    assert tokens == len(said) + 1 + len(book) + 1  # no token counts twice
    assert of_texts["loss"] == pytest.approx(total / tokens, rel=1e-5)
    assert of_texts["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-4)
    assert (of_texts["samples"], of_texts["tokens"], of_texts["split"]) == (2, tokens, 1)
    assert of_texts["left_out"] == {}
    assert of_both["loss"] == of_texts["loss"]
    assert of_both["left_out"] == {"with media": 5}
    assert (of_pictures["samples"], of_pictures["tokens"]) == (2, 4)
    assert sum(of_pictures["left_out"].values()) == 5
    assert list(of_pictures["left_out"].values()) == [2, 1, 1, 1]
    for _, _, line in found[3:]:
        assert line.startswith("error: source 'bare': no sample counts (1 with")
        assert line.count("\n") == 1
