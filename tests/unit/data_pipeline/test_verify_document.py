"""Documents that are malformed or that disagree with the index."""

import json

import pytest

from data_pipeline.index.shards import sample_json
from data_pipeline.ingest.ingest import ingest
from data_pipeline.inspect.document import describe, document_faults
from data_pipeline.inspect.problem import Fault
from tests.unit.data_pipeline.crude_samples import crude


@pytest.mark.parametrize(
    ("segment", "said"),
    [
        ("text", "list, expected an object"),
        ({"kind": "sound"}, "unknown kind 'sound'"),
        ({"kind": "text", "loss": True}, "'text' (a string)"),
        ({"kind": "text", "text": "a", "texts": ["a", "b"], "loss": True}, "both"),
        ({"kind": "text", "texts": ["a"], "loss": True}, "1 variants"),
        ({"kind": "text", "text": "a", "loss": 1}, "'loss' is 1"),
        ({"kind": "image", "file": "0.mp4"}, "no name for a image"),
        ({"kind": "image", "file": "../0.png"}, "no name for"),
        ({"kind": "image", "file": "1.png"}, "numbered [1]"),
        ({"kind": "video", "file": "0.mp4"}, "'timestamps'"),
        ({"kind": "region", "media": 0, "shape": "box", "label": "", "loss": True,
          "points": [[0, 0], [1, 1]]}, "no image of this sample"),
        ({"kind": "region", "media": 0, "shape": "ring", "label": "", "loss": True}, "'ring'"),
        ({"kind": "region", "media": 0, "shape": "box", "label": "", "loss": True,
          "points": [[0, 0]]}, "box with points"),
        ({"kind": "region", "media": 0, "shape": "turn", "label": "", "loss": True,
          "degrees": 45}, "degrees is 45"),
    ],
)  # fmt: skip
def test_documents_out_of_form(segment, said):
    segment = ["no", "object"] if segment == "text" else segment
    fault = describe(json.dumps({"meta": {}, "segments": [segment]}).encode(), None)
    assert isinstance(fault, Fault)
    assert fault.kind == "document"
    assert said in fault.detail


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"segments": []}', b"\xff", b"[" * 100_000])
def test_bytes_that_are_no_document(data):
    fault = describe(data, None)
    assert isinstance(fault, Fault)


def test_a_document_of_more_pieces_than_the_index(store, tokenizer):
    index = ingest(crude(4), store, "mixed", tokenizer, category="grounding")
    text = {"kind": "text", "text": "plain text number 0", "loss": True}
    described = describe(sample_json([text] * 3, {}), tokenizer)
    assert not isinstance(described, Fault)
    faults = document_faults(described, index, 0)
    assert [fault.detail for fault in faults] == [
        "piece_kind: 3 entries in the document, 2 in the index",
        "variant_tokens: 0 entries in the document, 2 in the index",
    ]
