"""Weights copied from bucket to bucket and back to a folder, while some requests are refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data_pipeline.store.open import open_store
from kimi_pretrain.checkpoint.storage_read import open_checkpoint
from kimi_pretrain.weights import hf_export, hf_import
from kimi_pretrain.weights.initial_weights import open_initial_weights
from tests.fault.fault_proxy import Fault
from tests.unit.kimi_pretrain.weights.weight_folders import (
    random_weights,
    small_config,
    write_folder,
)

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def test_from_a_bucket_into_a_bucket_and_out(tmp_path, s3_environment, proxy, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    config = small_config()
    weights = random_weights(config)
    folder = write_folder(tmp_path / "hf", weights, 3)
    root = f"s3://{s3_environment.bucket}/weights"
    store = open_store(f"{root}/hf")
    for file in folder.iterdir():
        store.put(file.name, file.read_bytes())
    slow = Fault("slowdown", method="", times=None, p=0.2)
    proxy.faults.append(slow)

    uri = hf_import.write(hf_import.plan(f"{root}/hf", config), f"{root}/place")
    assert uri == f"{root}/place/step_00000000"
    assert open_checkpoint(uri).verify() == []
    start = open_initial_weights(small_config(f"train.start_from={root}/place"))
    assert start is not None
    assert start.weights.reader.where == uri
    for name, tensor in weights.items():
        assert torch.equal(start.weights.read(name, torch.float32), tensor.float()), name

    options = hf_export.ExportOptions("kimi_k25", max_positions=128)
    hf_export.export(hf_export.plan(uri, options), tmp_path / "out", options)
    found = tensors_in(tmp_path / "out")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    assert slow.taken
    proxy.faults.remove(slow)
    store.close()
