"""S3 dialects: error codes of other servers, features they lack, and malformed answers."""

import time
from email.utils import formatdate

import pytest

from data_pipeline.govern.holds import enforces
from data_pipeline.store.open import (
    AccessDenied,
    MissingBucket,
    MissingKey,
    ObjectChanged,
    S3Store,
    StoreError,
    StoreUnavailable,
    open_store,
)
from data_pipeline.store.s3_answers import TABLE, TRANSIENT, failure, meaning_of, rows
from launch.local.user_errors import exit_code
from tests import ROOT
from tests.unit.data_pipeline.imitated_s3 import error, etag_of, imitated, listing

DATA = bytes(range(200))
PAGE = (200, {"Content-Type": "text/html", "ETag": '"p"'}, b"<!DOCTYPE html><html><p>Hi</p></html>")


@pytest.fixture
def s3(monkeypatch):
    """Return a store and its server; "x" holds DATA and was read once."""
    store, server = imitated(monkeypatch)
    server.objects["x"] = DATA
    assert store.get("x", 0, 5) == DATA[:5]
    server.asked.clear()
    return store, server


def always(answer, *methods):
    """Give one answer to every request of some methods; without methods, to every request."""
    return lambda asked: answer if asked.method in (methods or (asked.method,)) else None


# The table ---------------------------------------------------------------------------------------


def test_a_code_stands_in_one_row_and_the_docs_show_them_all():
    codes = [code for row in TABLE.values() for code in row.codes]
    statuses = [status for row in TABLE.values() for status in row.statuses]
    assert len(set(codes)) == len(codes) > 100
    assert len(set(statuses)) == len(statuses)
    page = (ROOT / "docs" / "DATA.md").read_text()
    shown = page.partition("<!-- s3 codes: begin -->\n")[2].partition("\n<!-- s3 codes: end")[0]
    assert shown == "\n".join(rows()), "`rows` of s3_answers gives it"


@pytest.mark.parametrize(("meaning", "row"), TABLE.items())
def test_who_can_mend_it_decides_the_exit_code(meaning, row):
    assert all(meaning_of(400, code) == meaning for code in row.codes)
    assert all(meaning_of(status, "") == meaning for status in row.statuses)
    assert (row.fault == "transient") == (meaning in TRANSIENT)
    if meaning not in TRANSIENT:
        raised = failure(meaning, "s3://b/k", "b", "HTTP 400 X", None)
        assert str(raised).startswith("s3://b/k: ")
        assert exit_code(raised) == 2


# Clocks ------------------------------------------------------------------------------------------


def skewed(seconds=3600.0):
    return error(403, "RequestTimeTooSkewed", Date=formatdate(time.time() - seconds, usegmt=True))


@pytest.mark.parametrize("call", ["get", "head", "put", "list"])
def test_one_skewed_answer_is_signed_anew(s3, call):
    store, server = s3
    server.once(skewed(), skewed())
    done = {
        "get": lambda: store.get("x"),
        "head": lambda: store.head("x").size,
        "put": lambda: store.put("y", b"1").size,
        "list": lambda: store.list(),
    }[call]()
    assert done == {"get": DATA, "head": 200, "put": 1, "list": ["x"]}[call]
    assert len(server.asked) == 3 or call == "head"  # a GET asks for the reason of a failed HEAD


@pytest.mark.parametrize("call", ["get", "head"])
def test_a_clock_that_stays_wrong_is_told_with_its_difference_and_exit_75(s3, call):
    store, server = s3
    server.odd = always(skewed())
    with pytest.raises(StoreUnavailable, match=r"RequestTimeTooSkewed.*clock is \+360\d s") as e:
        getattr(store, call)("x")
    assert exit_code(e.value) == 75


def test_a_head_that_is_refused_asks_for_the_reason(s3):
    store, server = s3
    server.once(error(403, ""), error(403, "InvalidAccessKeyId"), method="HEAD")
    assert store.head("x").size == 200  # the GET was answered, so the object exists
    server.odd = always(error(403, "AccessDenied"))
    with pytest.raises(AccessDenied, match="HTTP 403 AccessDenied"):
        store.head("x")
    server.odd = always(error(404, "NoSuchBucket"))
    with pytest.raises(MissingBucket, match="no bucket 'b'"):
        store.head("x")


def test_rotated_keys_are_fetched_once_more(s3):
    store, server = s3
    server.once(error(403, "InvalidAccessKeyId"))
    assert store.get("x") == DATA
    server.odd = always(error(403, "InvalidAccessKeyId"))
    with pytest.raises(AccessDenied, match="InvalidAccessKeyId.*, and again with credentials"):
        store.get("x")


def test_a_full_store_is_the_users(s3):
    store, server = s3
    server.odd = always(error(507, "XMinioStorageFull", "Storage backend is full"))
    with pytest.raises(StoreError, match="no room: HTTP 507 XMinioStorageFull: Storage b") as e:
        store.put("y", b"1")
    assert exit_code(e.value) == 2


# Features that some servers lack -----------------------------------------------------------------

REFUSALS = {
    "OSS": error(400, "NotImplemented", "A header you provided implies functionality"),
    "another": error(400, "InvalidArgument", "Unsupported header received for this API call."),
    "none": error(501, "NotImplemented"),
}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
def test_a_server_without_conditions_is_looked_at_first(s3, refusal, caplog):
    store, server = s3
    server.odd = lambda asked: refusal if "if-none-match" in asked.headers else None
    assert store.put_new("y", b"1")
    assert not store.put_new("y", b"2")
    assert not store.put_new("x", b"2")
    assert server.objects["y"] == b"1"
    assert sum("if-none-match" in asked.headers for asked in server.asked) == 1
    assert caplog.text.count("does without If-None-Match in PUT from now on") == 1


def test_a_server_that_knew_conditions_is_not_asked_without_them(s3):
    """Locks depend on conditions: one odd refusal must not let two writers hold a lock."""
    store, server = s3
    assert store.put_new("y", b"1")
    server.once(REFUSALS["another"])
    with pytest.raises(StoreError, match="InvalidArgument: Unsupported header"):
        store.put_new("z", b"1")
    assert "z" not in server.objects


def test_what_is_refused_without_the_header_too_has_another_reason(s3):
    store, server = s3
    refusal = error(400, "InvalidArgument", "no such storage", "<ArgumentName>class</ArgumentName>")
    server.odd = always(refusal, "PUT")
    with pytest.raises(StoreError, match="refused: HTTP 400 InvalidArgument: no such storage, cl"):
        store.put_new("y", b"1")
    server.odd = lambda _: None
    assert store.put_new("y", b"1")
    assert "if-none-match" in server.asked[-1].headers


@pytest.mark.parametrize("size", [100, 17 << 20])
def test_a_server_without_checksum_headers_gets_md5(s3, size, caplog):
    """B2 does this. A multipart upload starts with a checksum header, too."""
    store, server = s3
    told = "Unsupported header 'x-amz-checksum-crc32' received for this API call."
    parts: list[bytes] = []

    def answer(asked):
        if any("checksum" in name for name in asked.headers):
            return error(400, "InvalidArgument", told)
        if "uploads" in asked.query:
            text = "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUpload"
            return 200, {}, f"{text}Result>".encode()
        if asked.method == "PUT" and "partNumber" in asked.query:
            parts.append(asked.body)
            return 200, {"ETag": etag_of(asked.body)}, b""
        if asked.method == "POST":
            text = '<CompleteMultipartUploadResult><ETag>"w"</ETag></CompleteMultipartUploadResult>'
            return 200, {}, text.encode()
        return None

    server.odd = answer
    body = bytes(size)
    for key in ("a", "b"):
        parts.clear()
        done = store.put_verified(key, size, None, lambda at, n: body[at : at + n])
        assert not done.confirmed
        assert b"".join(parts) == body if size > 1000 else server.objects[key] == body
    refused = [asked for asked in server.asked if any("checksum" in n for n in asked.headers)]
    assert len(refused) == 1
    assert "without checksums by CRC-32 from now on: s3://b/a: refused: HTTP 400 Inv" in caplog.text
    assert told in caplog.text


def test_a_server_that_lists_no_uploads_has_none_that_could_be_told(s3, caplog):
    store, server = s3
    server.odd = lambda asked: error(501, "NotImplemented") if "uploads" in asked.query else None
    assert store.unfinished() == store.unfinished("x") == []
    assert sum("uploads" in asked.query for asked in server.asked) == 1
    assert "does without a list of unfinished uploads" in caplog.text


@pytest.mark.parametrize(
    "refusal",
    [error(501, "NotImplemented"), error(400, "InvalidRequest", "Missing ... Content-MD5")],
)
def test_a_server_that_deletes_one_at_a_time(s3, refusal):
    """GCS and StorageGRID do this. An object that cannot be deleted is reported by its key."""
    store, server = s3
    keys = [f"d{number}" for number in range(20)]
    server.objects |= dict.fromkeys(keys, b"1")

    def answer(asked):
        if "versions" in asked.query:
            return error(501, "NotImplemented")
        if "delete" in asked.query:
            return refusal
        if (asked.method, asked.key) == ("DELETE", "d7"):
            return error(403, "AccessDenied", "locked")
        return None

    server.odd = answer
    [(key, reason)] = store.discard([*keys, "gone"])
    assert (key, sorted(server.objects)) == ("d7", ["d7", "x"])
    assert "access denied" in reason
    store.discard(["d7"])
    assert sum("delete" in asked.query for asked in server.asked) == 1


def test_versions_that_may_not_be_listed_are_not_taken_for_none(s3):
    store, server = s3
    server.odd = lambda asked: error(400, "InvalidRequest") if "versions" in asked.query else None
    with pytest.raises(StoreError, match="InvalidRequest"):
        store.delete_versions("x")
    assert "x" in server.objects


def test_an_ignored_if_match_is_noticed_by_the_etag(s3):
    store, server = s3
    with pytest.raises(ObjectChanged, match='expected the version with ETag "old"'):
        store.get("x", 0, 5, etag='"old"')
    # the HEAD confirms the change
    assert [asked.method for asked in server.asked] == ["GET", "HEAD"]
    assert store.get("x", 0, 5, etag="W/" + etag_of(DATA)) == DATA[:5]  # a proxy weakened the ETag


def test_a_store_that_is_away_is_not_one_without_holds(s3):
    store, server = s3
    odd = {"versions": error(501, "NotImplemented")}
    server.odd = lambda asked: next((odd[name] for name in odd if name in asked.query), None)
    odd["legal-hold"] = error(400, "InvalidRequest", "Bucket is missing Object Lock Configuration")
    assert not enforces(store)
    odd["legal-hold"] = error(503, "SlowDown")
    with pytest.raises(StoreUnavailable):
        enforces(store)


# Addresses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["environment", "name"])
@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("", "http://store.test/bkt/x"),
        ("path", "http://store.test/bkt/x"),
        ("virtual", "http://bkt.store.test/x"),
    ],
)
def test_the_users_configuration_says_how_a_bucket_is_addressed(
    style, expected, by, monkeypatch, tmp_path
):
    said = f"s3 =\n  addressing_style = {style}\n" if style else ""
    (tmp_path / "config").write_text(f"[profile mine]\nregion = here-1\n{said}")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    (tmp_path / "keys").write_text("[mine]\naws_access_key_id = k\naws_secret_access_key = s\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    if by == "environment":
        monkeypatch.setenv("AWS_PROFILE", "mine")
    profile = "mine" if by == "name" else None
    store, server = imitated(monkeypatch, "s3://bkt", endpoint="http://store.test", profile=profile)
    server.odd = always((200, {"ETag": '"e"'}, b"1"))
    store.get("x")
    assert server.asked[0].url == expected


def test_a_misspelt_addressing_style_is_told(monkeypatch, tmp_path):
    (tmp_path / "config").write_text("[default]\ns3 =\n  addressing_style = vhost\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with pytest.raises(ValueError, match="addressing_style .* is 'vhost', expected one of path, v"):
        imitated(monkeypatch)


def test_where_the_endpoint_comes_from(monkeypatch, tmp_path):
    imitated(monkeypatch)  # sets the keys
    (tmp_path / "config").write_text("[default]\nendpoint_url = http://of.file\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))

    def asked(**options):
        store = open_store("s3://b", **options)
        assert isinstance(store, S3Store)
        return store.endpoint

    assert asked() == "http://of.file"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://of.all")
    assert asked() == "http://of.all"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://of.s3")
    assert asked() == "http://of.s3"
    assert asked(endpoint="http://given") == "http://given"
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    assert "amazonaws.com" in asked()


# Redirects ---------------------------------------------------------------------------------------

REDIRECTS = {
    "to https": (
        (301, {"Location": "https://me:pw@store.test/b/x?X-Amz-Signature=s"}, b""),
        "HTTP 301, to https://store.test;",
    ),
    "a temporary one": (
        (307, {"Location": "https://other.test/b/x"}, b"<html/>"),
        "HTTP 307, to https://o",
    ),
    "a permanent one": (
        error(301, "PermanentRedirect", more="<Endpoint>b.s3.eu.test</Endpoint>"),
        "HTTP 301 PermanentRedirect, to b.s3.eu.test",
    ),
}


@pytest.mark.parametrize(("answer", "told"), REDIRECTS.values(), ids=REDIRECTS)
@pytest.mark.parametrize("call", ["get", "head", "list"])
def test_a_redirect_is_told_with_its_address(monkeypatch, answer, told, call):
    store, server = imitated(monkeypatch)
    server.odd = always(answer)
    with pytest.raises(StoreError, match=f"sends this request elsewhere: {told}") as e:
        getattr(store, call)("x")
    assert "set data.endpoint or AWS_ENDPOINT_URL" in str(e.value)
    assert "pw" not in str(e.value)
    assert "Signature" not in str(e.value)
    assert exit_code(e.value) == 2
    assert len(server.asked) <= 2


def test_a_region_that_a_redirect_names_is_taken(monkeypatch):
    store, server = imitated(monkeypatch)
    server.objects["x"] = DATA
    server.once(error(400, "AuthorizationHeaderMalformed", more="<Region>eu-west-9</Region>"))
    assert store.get("x") == DATA
    assert "/eu-west-9/s3/" in server.asked[-1].headers["authorization"]


def test_a_server_that_redirects_for_a_moment_is_waited_for(s3):
    store, server = s3
    server.once(*(answer for answer, _ in REDIRECTS.values()))
    assert store.get("x") == DATA
    server.odd = always(REDIRECTS["to https"][0])
    with pytest.raises(StoreUnavailable, match="HTTP 301, to https://store.test; no progress") as e:
        store.get("x")
    assert exit_code(e.value) == 75


# Folder markers ----------------------------------------------------------------------------------


def test_markers_of_folders_are_passed_over(monkeypatch):
    store, server = imitated(monkeypatch, "s3://b/root")
    server.objects = {key: b"" for key in ("root/", "root/src/", "root/src/a", "root/src/sub/")}
    assert store.list() == ["src/a"]
    assert store.list("src/") == ["src/a"]
    server.odd = always(versions(*map(deleted, ("root/src/", "root/src/a"))), "GET")
    assert [one.key for one in store.bygone()] == ["src/a"]


# Versions ----------------------------------------------------------------------------------------


def versions(*entries):
    """Return a page of ListObjectVersions."""
    return 200, {}, f"<ListVersionsResult>{''.join(entries)}</ListVersionsResult>".encode()


def version(key, kind="Version", mark="1", newest=""):
    latest = f"<IsLatest>{newest}</IsLatest>" if newest else ""
    return f"<{kind}><Key>{key}</Key><VersionId>{mark}</VersionId>{latest}</{kind}>"


def deleted(key):
    """Return an old version under a delete marker."""
    return version(key, newest="false") + version(key, "DeleteMarker", "2", "true")


def test_an_object_is_deleted_only_where_the_server_says_so(s3):
    """Old versions of deleted objects are collected, unless the server sends no IsLatest marks."""
    store, server = s3
    there = version("a", newest="true") + version("a", "DeleteMarker", "0", "false")
    for entries in ((version("a"),), (there,), (version("a", newest="false"),)):
        server.odd = always(versions(*entries, deleted("b")), "GET")
        assert [(one.key, one.mark) for one in store.bygone()] == [("b", "1")]


# Malformed answers ------------------------------------------------------------------------------

ODD = {
    "an error body": (200, {}, b"<Error><Code>InternalError</Code></Error>"),
    "an HTML page": PAGE,
    "nothing": (200, {}, b""),
    "a refusal of a proxy": (403, {"Content-Type": "text/html"}, b"<html><h1>Forbidden</h1>"),
    "a page of a proxy": (404, {"Content-Type": "text/html"}, b"<html><h1>Nothing</h1>"),
    "a temporary redirect": (307, {"Location": "https://other.test/"}, b""),
    "packed": (200, {"ETag": etag_of(DATA), "Content-Encoding": "gzip"}, b"\x1f\x8b\x08"),
    "a length that is none": (200, {"ETag": etag_of(DATA), "Content-Length": "abc"}, DATA),
}
OF_AN_OBJECT = {
    "the whole object": (200, {"ETag": etag_of(DATA)}, DATA),
    "another range": (206, {"ETag": etag_of(DATA), "Content-Range": "bytes 0-8/200"}, DATA[:9]),
    "too long": (206, {"ETag": etag_of(DATA), "Content-Range": "bytes 3-22/200"}, DATA[3:23]),
    "too short": (206, {"ETag": etag_of(DATA), "Content-Range": "bytes 3-5/200"}, DATA[3:6]),
    "no ETag": (206, {"Content-Range": "bytes 3-11/200"}, DATA[3:12]),
    "another ETag": (206, {"ETag": '"o"', "Content-Range": "bytes 3-11/200"}, DATA[3:12]),
    "a date that is none": (
        206,
        {"ETag": etag_of(DATA), "Content-Range": "bytes 3-11/200", "Last-Modified": "soon"},
        DATA[3:12],
    ),
}


@pytest.mark.parametrize("odd", (ODD | OF_AN_OBJECT).values(), ids=ODD | OF_AN_OBJECT)
def test_one_odd_answer_does_not_end_a_read(s3, odd):
    store, server = s3
    server.once(odd)
    assert store.get("x", 3, 9) == DATA[3:12]
    assert len(server.asked) >= 2


LASTING = {name: odd for name, odd in (ODD | OF_AN_OBJECT).items() if name != "a date that is none"}


@pytest.mark.parametrize("odd", LASTING.values(), ids=LASTING)
def test_odd_answers_without_end_are_told_and_exit_75(s3, odd):
    store, server = s3
    server.odd = always(odd, "GET")
    with pytest.raises(StoreUnavailable, match=r"gave up after 6 attempts \(") as e:
        store.get("x", 3, 9)
    assert exit_code(e.value) == 75


CALLS = {
    "head": lambda store: store.head("x").size,
    "put": lambda store: store.put("y", b"12").size,
    "put_new": lambda store: store.put_new("z", b"12"),
    "list": lambda store: store.list("x"),
    "list_folders": lambda store: store.list_folders(),
    "discard": lambda store: store.discard(["x"]),
    "get whole": lambda store: store.get("x"),
}
DONE = (200, True, 2, ["x"], [], DATA)


# A HEAD has no body that shows the fault.
PAIRS = [
    (call, name)
    for call in CALLS
    for name in ODD
    if call != "head" or name not in ("an HTML page", "packed")
]


@pytest.mark.parametrize(("call", "name"), PAIRS)
def test_one_odd_answer_is_no_success_of_any_request(s3, call, name):
    store, server = s3
    results = b"<DeleteResult></DeleteResult>"
    normal = {"delete": (200, {}, results), "versions": error(501, "NotImplemented")}

    def answer(asked):
        if left:
            return left.pop()
        return next((normal[name] for name in normal if name in asked.query), None)

    left = [ODD[name]]
    server.odd = answer
    assert CALLS[call](store) in DONE
    assert len(server.asked) >= 2
    if call == "put":
        assert server.objects["y"] == b"12"


def test_an_empty_answer_is_no_empty_listing(s3):
    store, server = s3
    server.odd = always((200, {}, b""))
    for call in (store.list, store.list_folders, store.unfinished, store.bygone):
        with pytest.raises(StoreUnavailable, match="HTTP 200 with 0 bytes, expected List"):
            call()


def test_a_cut_off_listing_without_an_end_is_given_up(s3):
    store, server = s3
    server.odd = always(listing(["x"], token="t"))  # the same page for ever
    with pytest.raises(StoreUnavailable, match="cut off and does not say where it goes on"):
        store.list()
    assert len(server.asked) < 10
    # other pages, same keys
    server.odd = lambda asked: listing(["x"], token=f"t{len(server.asked)}")
    with pytest.raises(StoreUnavailable, match="cut off and does not say"):
        store.list()
    text = listing([])[2].replace(b"false", b"true")
    server.odd = always((200, {}, text))
    with pytest.raises(StoreUnavailable, match="cut off and does not say"):
        store.list()


def test_a_listing_that_never_holds_anything_is_given_up(s3, monkeypatch):
    monkeypatch.setattr("data_pipeline.store.s3_form._MOST_EMPTY", 20)
    store, server = s3
    server.odd = lambda asked: listing([], token=f"t{len(server.asked)}")
    with pytest.raises(StoreUnavailable, match="20 pages of the listing hold nothing"):
        store.list()


def test_a_page_that_is_asked_for_again_is_the_same_one(s3):
    store, server = s3
    pages = [listing(["a"], token="1"), PAGE, listing(["b"], token="2"), listing(["c"])]
    server.once(*pages)
    assert store.list() == ["a", "b", "c"]


NAMELESS = {
    "list": "<ListBucketResult><Contents><Size>1</Size></Contents></ListBucketResult>",
    "list_folders": "<ListBucketResult><CommonPrefixes></CommonPrefixes></ListBucketResult>",
    "bygone": "<ListVersionsResult><Version><Key>a</Key></Version></ListVersionsResult>",
    "unfinished": "<ListMultipartUploadsResult><Upload><Key>a</Key></Upload>"
    "</ListMultipartUploadsResult>",
}


@pytest.mark.parametrize("call", NAMELESS)
def test_an_entry_of_a_listing_that_names_nothing_is_asked_for_again(s3, call):
    store, server = s3
    server.odd = always((200, {}, NAMELESS[call].encode()))
    with pytest.raises(StoreUnavailable, match="of the listing has an entry without") as e:
        getattr(store, call)()
    assert exit_code(e.value) == 75


@pytest.mark.parametrize("header", ["Content-Length", "Content-Range"])
def test_a_number_of_thousands_of_digits_is_a_wrong_answer(s3, header):
    store, server = s3
    given = {"Content-Length": "9" * 5000, "Content-Range": "bytes 3-11/" + "9" * 5000}
    server.once((206, {"ETag": etag_of(DATA), header: given[header]}, DATA[3:12]))
    assert store.get("x", 3, 9) == DATA[3:12]
    server.once((200, {"Content-Length": "9" * 5000}, listing([])[2]))
    assert store.list() == ["x"]


def removal(*errors):
    """Return an answer to DeleteObjects with an error for each (key, code)."""
    entries = (f"<Error><Key>{key}</Key><Code>{code}</Code></Error>" for key, code in errors)
    return 200, {}, f"<DeleteResult>{''.join(entries)}</DeleteResult>".encode()


def answering(answers):
    """Answer bulk deletions with these answers in turn; the bucket has no versions."""

    def answer(asked):
        if "versions" in asked.query:
            return error(501, "NotImplemented")
        return answers.pop(0) if "delete" in asked.query else None

    return answer


def test_an_object_that_could_not_be_removed_for_a_moment_is_removed(s3):
    """A DeleteObjects answer with status 200 may hold transient errors for some objects."""
    store, server = s3
    server.objects |= {"y": b"1", "z": b"2"}
    server.odd = answering([removal(("x", "InternalError"), ("y", "AccessDenied"))])
    assert store.discard(["x", "y"]) == [("y", "AccessDenied")]
    assert "x" not in server.objects
    server.odd = answering([removal(("z", "SlowDown")), *[removal()] * 9])
    odd = server.odd
    server.odd = lambda asked: error(503, "SlowDown") if asked.method == "DELETE" else odd(asked)
    with pytest.raises(StoreUnavailable):
        store.discard(["z"])


@pytest.mark.parametrize("odd", [("other", "AccessDenied"), ("", "AccessDenied")])
def test_an_answer_about_other_removals_is_not_taken(s3, odd):
    store, server = s3
    server.odd = answering([removal(odd), removal()])
    assert store.discard(["x"]) == []


def test_keys_of_another_listing_are_not_taken(s3):
    """A proxy's cache answers for another folder: its keys must not be removed in this folder."""
    store, server = s3
    server.once(listing(["other/y"]))
    assert store.list("x") == ["x"]


def test_an_etag_that_another_answer_brought_does_not_end_a_run_of_the_same_object(s3):
    store, server = s3
    odd = OF_AN_OBJECT["another ETag"]
    server.once(odd, (412, {}, b"<Error><Code>PreconditionFailed</Code></Error>"), method="GET")
    assert store.get("x", 3, 9, etag=etag_of(DATA)) == DATA[3:12]
    server.objects["x"] = b"another object" * 9
    with pytest.raises(ObjectChanged):
        store.get("x", 3, 9, etag=etag_of(DATA))


def test_a_server_that_never_spoke_s3_is_believed_at_once(monkeypatch):
    """A misspelt endpoint is a user error: the start must not wait two minutes for it."""
    store, server = imitated(monkeypatch)
    server.odd = always(ODD["a page of a proxy"])
    for call in (store.get, store.head):
        with pytest.raises(MissingKey):
            call("x")
    server.odd = always(ODD["a refusal of a proxy"])
    with pytest.raises(AccessDenied):
        store.get("x")
