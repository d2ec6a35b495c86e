#!/usr/bin/env python3
"""Reads images and records by docs/formats.md alone, with nothing but Python's own library, and compares them with
values written by hand, and with the dumps in that document.

usage: read_image.py <folder of fixtures> <docs/formats.md>
"""

import json
import struct
import sys
import uuid

DTYPES = {  # name: (number, bytes)
    "BOOL": (1, 1),
    "U8": (2, 1),
    "I8": (3, 1),
    "F8_E4M3": (4, 1),
    "F8_E5M2": (5, 1),
    "U16": (6, 2),
    "I16": (7, 2),
    "F16": (8, 2),
    "BF16": (9, 2),
    "U32": (10, 4),
    "I32": (11, 4),
    "F32": (12, 4),
    "U64": (13, 8),
    "I64": (14, 8),
    "F64": (15, 8),
    "C64": (16, 8),
    "F8_E8M0": (17, 1),
    "F8_E4M3FNUZ": (18, 1),
    "F8_E5M2FNUZ": (19, 1),
}
DTYPE_BYTES = dict(DTYPES.values())
BLOCK = 1 << 20
MASK = (1 << 64) - 1


def check(what, actual, expected):
    if actual != expected:
        raise SystemExit(f"{what}: {actual!r}, expected {expected!r}")


# --- Digests -----------------------------------------------------------------------------------------------------


def crc_table():
    polynomial = int(f"{0x42F0E1EBA9EA3693:064b}"[::-1], 2)  # reflected
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (polynomial if byte & 1 else 0)
        table.append(byte)
    return table


CRC_TABLE = crc_table()


def crc64(data):
    crc = MASK
    for byte in data:
        crc = (crc >> 8) ^ CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ MASK


def block_digests(data):
    return [crc64(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]


# --- Protobuf's wire format --------------------------------------------------------------------------------------


def varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value & MASK, at


def fields(data):
    """Field number: list of values (whole numbers or bytes)."""
    out = {}
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, at = varint(data, at)
        elif wire_type == 1:
            value, at = struct.unpack_from("<Q", data, at)[0], at + 8
        elif wire_type == 2:
            length, at = varint(data, at)
            value, at = data[at : at + length], at + length
            check("length of a field", len(value), length)
        else:
            raise SystemExit(f"wire type {wire_type} is not written by anyone")
        out.setdefault(number, []).append(value)
    return out


def one(message, number, default):
    values = message.get(number, [default])
    check(f"count of field {number}", len(values), 1)
    return values[0]


def packed(data):
    out, at = [], 0
    while at < len(data):
        value, at = varint(data, at)
        out.append(value)
    return out


def read_slice(data):
    message = fields(data)
    place = None
    if 4 in message:
        box = fields(one(message, 4, b""))
        place = ("box", packed(one(box, 1, b"")), packed(one(box, 2, b"")))
    elif 5 in message:
        flat = fields(one(message, 5, b""))
        place = ("flat", one(flat, 1, 0), one(flat, 2, 0))
    return {
        "name": one(message, 1, b"").decode(),
        "dtype": one(message, 2, 0),
        "shape": packed(one(message, 3, b"")),
        "place": place,
        "offset": one(message, 6, 0),
        "bytes": one(message, 7, 0),
        "key": one(message, 8, b"").decode(),
        "kind": one(message, 9, 0),
        "codec": one(message, 10, b"").decode(),
    }


def read_record(file):
    check("magic", file[:8], b"HFRECORD")
    version, reserved, body_bytes = struct.unpack_from("<IIQ", file, 8)
    check("reserved", reserved, 0)
    check("length of the record file", len(file), 24 + body_bytes + 8)
    check(
        "CRC of the record",
        struct.unpack_from("<Q", file, 24 + body_bytes)[0],
        crc64(file[: 24 + body_bytes]),
    )
    body = fields(file[24 : 24 + body_bytes])
    check("format version", version, 2 if 15 in body else 1)
    digests = one(body, 12, b"")
    record = {
        "job": str(uuid.UUID(bytes=one(body, 1, b""))),
        "job_name": one(body, 2, b"").decode(),
        "attempt": one(body, 3, 0),
        "step": one(body, 4, 0),
        "rank": one(body, 5, 0),
        "world_size": one(body, 6, 0),
        "generation": one(body, 7, 0),
        "image_bytes": one(body, 8, 0),
        "header_bytes": one(body, 9, 0),
        "layout_hash": one(body, 10, b"").hex(),
        "sealed_unix_ms": one(body, 14, 0),
        "descent": [tuple(one(fields(d), n, 0) for n in (1, 2, 3)) for d in body.get(13, [])],
    }
    if 15 in body:
        kept = fields(one(body, 15, b""))
        header_digests = one(kept, 3, b"")
        record["kept"] = {
            "image_bytes": one(kept, 1, 0),
            "header_bytes": one(kept, 2, 0),
            "header_digests": list(struct.unpack(f"<{len(header_digests) // 8}Q", header_digests)),
            "runs": packed(one(kept, 4, b"")),
            "owners": packed(one(kept, 5, b"")),
            "plan": one(kept, 6, b""),
        }
    slices = [read_slice(s) for s in fields(one(body, 11, b"")).get(1, [])]
    return record, slices, list(struct.unpack(f"<{len(digests) // 8}Q", digests))


# --- Image -------------------------------------------------------------------------------------------------------


def unique(pairs):
    out = dict(pairs)
    check("keys of a JSON object", len(out), len(pairs))
    return out


def product(numbers):
    out = 1
    for number in numbers:
        out *= number
    return out


def local_shape(s):
    if s["place"] is None:
        return s["shape"]
    return s["place"][2] if s["place"][0] == "box" else [s["place"][2]]


def header_key(s, rank):
    return f"holdfast:{rank:07d}:{s['key']}:{s['name']}" if s["key"] else s["name"]


def place_order(place):
    if place is None:
        return (0,)
    return (1 if place[0] == "box" else 2, place[1], place[2])


def check_image(image, record, slices, digests):
    """Everything that the document says of an image and its record, but for values."""
    n = struct.unpack_from("<Q", image, 0)[0]
    check("header length", 8 + n, record["header_bytes"])
    check("alignment of the data", (8 + n) % 4096, 0)
    check("image length", len(image), record["image_bytes"])
    text = image[8 : 8 + n].decode()
    header = json.loads(text, object_pairs_hook=unique)
    check("JSON's first byte and padding", (text[0], text.rstrip(" ")[-1]), ("{", "}"))
    metadata = header.pop("__metadata__")
    check("metadata", list(metadata), ["DCP_SHARDING_INFO", "DCP_VERSION", "format"])
    check("DCP_VERSION", metadata["DCP_VERSION"], "1.0")
    check("format", metadata["format"], "pt")
    sharding = json.loads(metadata["DCP_SHARDING_INFO"], object_pairs_hook=unique)

    keys = [header_key(s, record["rank"]) for s in slices]
    check("keys", list(header), keys)
    check("keys of the sharding info", list(sharding), keys)
    order = [
        (-DTYPE_BYTES[s["dtype"]], s["name"].encode(), place_order(s["place"])) for s in slices
    ]
    check("order", order, sorted(order))
    offset = 8 + n
    expected_digests = block_digests(image[: 8 + n])
    for s, key in zip(slices, keys):
        entry = header[key]
        shape = local_shape(s)
        check(f"dtype of {key}", DTYPES[entry["dtype"]][0], s["dtype"])
        check(f"shape of {key}", entry["shape"], shape)
        check(f"length of {key}", s["bytes"], product(shape) * DTYPE_BYTES[s["dtype"]])
        check(f"place of {key}", s["offset"], offset)
        check(
            f"data_offsets of {key}",
            entry["data_offsets"],
            [offset - 8 - n, offset - 8 - n + s["bytes"]],
        )
        at = s["place"][1] if not s["key"] and s["place"] else [0] * len(shape)
        check(f"saved_offsets of {key}", sharding[key], {"saved_offsets": at})
        expected_digests += block_digests(image[offset : offset + s["bytes"]])
        offset += s["bytes"]
    check("end of the data", offset, len(image))
    check("digests", digests, expected_digests)


def read(folder, stem):
    with open(f"{folder}/{stem}.safetensors", "rb") as f:
        image = f.read()
    with open(f"{folder}/{stem}.record", "rb") as f:
        record, slices, digests = read_record(f.read())
    check_image(image, record, slices, digests)
    return image, record, slices


# --- The fixtures ------------------------------------------------------------------------------------------------


def slice_of(name, dtype, shape, place=None, key="", kind=0, codec=""):
    return {
        "name": name,
        "dtype": DTYPES[dtype][0],
        "shape": shape,
        "place": place,
        "key": key,
        "kind": kind,
        "codec": codec,
    }


def without_lengths(slices):
    return [{k: v for k, v in s.items() if k not in ("offset", "bytes")} for s in slices]


def check_example(folder):
    image, record, slices = read(folder, "example")
    check(
        "example's record",
        record,
        {
            "job": "00112233-4455-4677-8899-aabbccddeeff",
            "job_name": "demo",
            "attempt": 1,
            "step": 7,
            "rank": 1,
            "world_size": 2,
            "generation": 1,
            "image_bytes": 4122,
            "header_bytes": 4096,
            "layout_hash": "2bb7371a578593a30baa61a550e7923d",
            "sealed_unix_ms": 1700000000000,
            "descent": [(1, 0, 0)],
        },
    )
    check(
        "example's slices",
        without_lengths(slices),
        [
            slice_of("w", "F32", [4, 2], ("box", [2, 0], [2, 2])),
            slice_of("progress", "U8", [10], key="json", kind=1),
        ],
    )
    check("w", struct.unpack_from("<4f", image, slices[0]["offset"]), (1.0, 2.0, 3.0, 4.0))
    check("progress", json.loads(image[slices[1]["offset"] :]), {"step": 7})


def check_varied(folder):
    image, record, slices = read(folder, "varied")
    check("varied's descent", record["descent"], [(3, 1, 40), (1, 0, 0)])
    plain = {name: slice_of(f"dtype {name}", name, [2]) for name in DTYPES}
    check(
        "varied's slices",
        without_lengths(slices),
        [
            plain["C64"],
            plain["F64"],
            plain["I64"],
            plain["U64"],
            slice_of("scalar", "F64", []),
            plain["F32"],
            plain["I32"],
            plain["U32"],
            slice_of("empty", "F32", [0, 7]),
            slice_of("sharded", "F32", [8, 4], ("box", [2, 0], [2, 4])),
            slice_of("sharded", "F32", [8, 4], ("box", [6, 1], [1, 3]), key="box:6,1:1,3"),
            slice_of("bf16", "BF16", [3, 5]),
            plain["BF16"],
            plain["F16"],
            plain["I16"],
            plain["U16"],
            slice_of("flat", "F16", [10, 10], ("flat", 37, 21), key="flat:37:21"),
            plain["BOOL"],
            plain["F8_E4M3"],
            plain["F8_E5M2"],
            plain["F8_E8M0"],
            plain["I8"],
            plain["U8"],
            slice_of("progress", "U8", [11], key="json", kind=1),
            slice_of('quote" back\\slash\nnew line \x01 ü', "I8", [3]),
            slice_of("rng", "U8", [9], key="opaque:pickle.v4", kind=2, codec="pickle.v4"),
        ],
    )
    for i, s in enumerate(slices):
        expected = bytes(((i + 1) * 37 + at) % 256 for at in range(s["bytes"]))
        check(f"bytes of slice {i}", image[s["offset"] : s["offset"] + s["bytes"]], expected)


def header_of(slices, rank):
    """As the document says; names are plain here."""
    sharding, entries, at = {}, {}, 0
    for s in slices:
        key, shape = header_key(s, rank), local_shape(s)
        offsets = s["place"][1] if not s["key"] and s["place"] else [0] * len(shape)
        sharding[key] = {"saved_offsets": offsets}
        dtype = next(name for name, (number, _) in DTYPES.items() if number == s["dtype"])
        entries[key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + s["bytes"]]}
        at += s["bytes"]
    metadata = {
        "DCP_SHARDING_INFO": json.dumps(sharding, separators=(",", ":")),
        "DCP_VERSION": "1.0",
        "format": "pt",
    }
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // 4096) * 4096 - 8
    return struct.pack("<Q", length) + text.ljust(length)


def digests_by_slice(record, slices, digests):
    """Of the header, then of each slice."""
    out, at = [], 0
    for length in [record["header_bytes"]] + [s["bytes"] for s in slices]:
        blocks = -(-length // BLOCK)
        out.append(digests[at : at + blocks])
        at += blocks
    check("count of digests", at, len(digests))
    return out


def check_shared(folder):
    """Two replicas: what each file has, and each whole image, put together of both."""
    files, records = [], []
    for rank in range(2):
        with open(f"{folder}/shared-{rank}.safetensors", "rb") as f:
            files.append(f.read())
        with open(f"{folder}/shared-{rank}.record", "rb") as f:
            records.append(read_record(f.read()))
    where = []  # by rank and tensor slice: its place in the file, if it is kept
    for file, (record, slices, digests) in zip(files, records):
        kept = record["kept"]
        stays = [i % 2 == 0 for i, n in enumerate(kept["runs"]) for _ in range(n)]
        check("slices in runs", len(stays), len(slices))
        per_slice = digests_by_slice(record, slices, digests)
        view, view_digests = [], list(kept["header_digests"])
        places, at = [], kept["header_bytes"]
        for s, stay, own in zip(slices, stays, per_slice[1:]):
            if s["kind"] == 0:
                places.append(at if stay else None)
            if stay:
                view.append({**s, "offset": at})
                view_digests += own
                at += s["bytes"]
        check_image(file, {**record, **kept}, view, view_digests)
        where.append(places)
    for rank, (record, slices, digests) in enumerate(records):
        per_slice = digests_by_slice(record, slices, digests)
        header = header_of(slices, rank)
        check("header of the whole", block_digests(header), per_slice[0])
        owners = iter(record["kept"]["owners"])
        whole, tensor, own_at = header, 0, record["kept"]["header_bytes"]
        stays = [i % 2 == 0 for i, n in enumerate(record["kept"]["runs"]) for _ in range(n)]
        for s, stay, own in zip(slices, stays, per_slice[1:]):
            source, at = (rank, own_at) if stay else (next(owners), None)
            if not stay:
                at = where[source][tensor]
            data = files[source][at : at + s["bytes"]]
            check(f"digests of {s['name']} of rank {rank}", block_digests(data), own)
            check("place in the whole", s["offset"], len(whole))
            whole += data
            own_at += s["bytes"] if stay else 0
            tensor += s["kind"] == 0
        check("length of the whole", len(whole), record["image_bytes"])
        check_image(whole, record, slices, digests)
        check("the last bytes of the whole", whole[-5:], b"scale")


def read_dump(lines):
    data = b""
    repeat = False
    for line in lines:
        if line.strip() == "*":
            repeat = True
            continue
        offset, _, rest = line.partition("  ")
        if repeat:
            data += data[-16:] * ((int(offset, 16) - len(data)) // 16)
            repeat = False
        check("offset in a dump", int(offset, 16), len(data))
        data += bytes.fromhex(rest.split("  |")[0])
    return data


def check_dumps(folder, document):
    with open(document, encoding="utf-8") as f:
        text = f.read()
    for name in ("example.safetensors", "example.record"):
        between = text.split(f"<!-- dump of {name}: begin -->\n")[1].split(
            f"<!-- dump of {name}: end -->"
        )[0]
        lines = between.strip().splitlines()
        check(f"fences around the dump of {name}", (lines[0], lines[-1]), ("```", "```"))
        with open(f"{folder}/{name}", "rb") as f:
            check(f"dump of {name} in {document}", read_dump(lines[1:-1]), f.read())


def main():
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    folder, document = sys.argv[1:]
    check("CRC-64/XZ of 123456789", crc64(b"123456789"), 0x995DC9BBDF1939FA)
    check_example(f"{folder}/v1")
    check_varied(f"{folder}/v1")
    check_dumps(f"{folder}/v1", document)
    check_shared(f"{folder}/v2")
    print("images, records and documentation agree")


if __name__ == "__main__":
    main()
