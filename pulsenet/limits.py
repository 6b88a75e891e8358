"""Protocol limits. All peers must agree on them, so they are not configuration.

Each constant states its unit in its name and its reason below it.
"""

from typing import Final

WIRE_VERSION: Final = 1
"""Version of the wire format this code speaks."""

CHUNK_SIZE_BYTES: Final = 1 << 20
"""Nominal chunk size. Measured: 4 MiB chunks gain nothing over p2pd streams."""

CHUNK_SIZE_BYTES_MAX: Final = 1 << 20
"""A chunk list naming a larger chunk is refused before anything is fetched."""

CHUNKS_PER_REQUEST_MAX: Final = 4
"""Bounds what one request can make a provider send."""

STREAMS_PER_PEER_MAX: Final = 8
"""Streams one requester keeps open to one provider. Each begins with 256 KiB that may be sent unread, and a lossy link
of 20 Mb/s and 200 ms holds more than four of those: eight carry a quarter more (docs/benchmarks.md)."""

FRAME_SIZE_BYTES_MAX: Final = CHUNK_SIZE_BYTES_MAX + 4096
"""One frame carries at most one chunk and its message header."""

HELLO_SIZE_BYTES_MAX: Final = 4096
"""The first frame of a stream, before a node knows whether it will serve the peer."""

RECORD_SIZE_BYTES_MAX: Final = 256 << 10
"""A signed record (descriptor, catalogue, manifest, head) in bytes."""

RECORDS_PER_REQUEST_MAX: Final = 64
"""Records named by one request."""

DHT_RECORD_SIZE_BYTES_MAX: Final = 64 << 10
"""Larger values store locally only and time out in lookups (measured)."""

CHUNK_LIST_ENTRIES_MAX: Final = 1 << 20
"""Chunks in one blob: 1 TiB at the nominal size."""

TENSORS_MAX: Final = 65_536
"""Entries of a parameter table."""

TENSOR_NAME_SIZE_BYTES_MAX: Final = 512
"""A tensor's name in UTF-8."""

TENSOR_DIMENSIONS_MAX: Final = 8
"""Dimensions of one tensor."""

TENSOR_ELEMENTS_MAX: Final = 1 << 48
"""Elements of one tensor: byte counts of any dtype then fit in 64 bits."""

TABLE_SIZE_BYTES_MAX: Final = 16 << 20
"""Encoded parameter table: names, dtypes, shapes, aliases, exclusions."""

CONTRIBUTION_ELEMENTS_MAX: Final = 1 << 36
"""Elements of all master weights: a chunk list then has room for every section of a contribution."""

CATALOGUE_ENTRIES_MAX: Final = 1_024
"""Manifests named by a catalogue."""

KEYS_PER_ROLE_MAX: Final = 1_024
"""Keys listed for one role in a descriptor."""

SIGNATURES_MAX: Final = 64
"""Signatures on one record."""

AUTHORITIES_MAX: Final = 2 * SIGNATURES_MAX - 1
"""Authorities of a run: a record takes the signatures of more than half of them."""

REVISIONS_PER_REQUEST_MAX: Final = 64
"""Descriptor revisions a joiner may ask for at once."""

ADDRESSES_MAX: Final = 16
"""Multiaddresses in one have record or token."""

ADDRESS_SIZE_BYTES_MAX: Final = 256
"""One multiaddress in text."""

ANCHORS_LISTED_MAX: Final = 16
"""Anchors named by one have record."""

MESSAGE_DEPTH_MAX: Final = 8
"""Nesting of a decoded message."""

MESSAGE_ITEMS_MAX: Final = 65_536
"""Items of one array or map in a decoded message or record."""

BLOCK_ELEMENTS: Final = 1 << 20
"""Elements of one codec block: independent units of work for cores and GPUs."""

PATCH_OVERHEAD_RATIO_MAX: Final = 1.01
"""No patch exceeds this times dense, plus 64 bytes a tensor, plus 1 KiB."""

ROUND_MEMBERS_MAX: Final = 1_024
"""Contributions listed by one receipt, and as many rejected ones."""

ROSTER_MEMBERS_MAX: Final = ROUND_MEMBERS_MAX
"""Members of one roster; a global mean has no more slices."""

ROSTER_ROUNDS_MAX: Final = 1_024
"""Rounds one roster may be valid for."""

ROSTERS_PER_REPLY_MAX: Final = 3
"""Rosters a node keeps and tells: of the rounds before, of now, and of the rounds to come."""

SHARE_SIZE_BYTES_MAX: Final = 2_048
"""One signed share."""

SHARES_PER_REPLY_MAX: Final = 256
"""Shares in one reply."""

PROBERS_MAX: Final = 16
"""Members of a roster that answer a probe: 120 pairs, and what a coordinator keeps of a round stays below 4 MiB."""

PROBE_ANSWER_SIZE_BYTES_MAX: Final = 160 << 10
"""One trainer's answer to a probe: 256 tokens of 256 bins are 128 KiB."""

PROBE_SCORES_MAX: Final = 16_384
"""Tensors of which one trainer tells how far apart two of them were."""

VOTE_SIZE_BYTES_MAX: Final = 2_048
"""One signed vote."""

VOTE_LEASE_SECONDS: Final = 12.0
"""How long a voter gives no other candidate its vote, by its own monotonic clock."""

VOTE_RENEW_SECONDS: Final = 4.0
"""How often a coordinator has its votes renewed."""

ROUND_RECEIPTS_PER_REPLY_MAX: Final = 64
"""Final receipts in one reply; fewer where they would not fit a frame."""

ROLLOUT_BATCH_SIZE_BYTES_MAX: Final = 1 << 20
"""One signed rollout batch."""

ROLLOUT_BODY_SIZE_BYTES_MAX: Final = 4 << 20
"""The arrays of one rollout batch before compression."""

ROLLOUT_SAMPLES_MAX: Final = 4_096
"""Samples in one rollout batch."""

REWARD_PARTS_MAX: Final = 16
"""Named parts of the rewards of one rollout batch."""

ROLLOUT_QUEUE_BATCHES_MAX: Final = 1_024
ROLLOUT_QUEUE_SIZE_BYTES_MAX: Final = 256 << 20
"""Batches a node keeps, to be sent or for the training process; beyond, whoever brings more has to wait."""

ROLLOUT_WINDOW_COUNT: Final = 1_024
"""Numbers of one key that a trainer remembers, taken or not; a sender has no more batches waiting than that."""

TASK_SIZE_BYTES_MAX: Final = 65_536
"""Content of one task."""

TASKS_MAX: Final = 4_096
TASKS_SIZE_BYTES_MAX: Final = 64 << 20
"""Tasks one trainer's node keeps; beyond, the training process has to wait."""

TASKS_PER_REPLY_MAX: Final = 64
TASKS_PER_BATCH_MAX: Final = 256
"""Tasks leased at once, and answered by one rollout batch."""

NEIGHBOURS_MIN: Final = 6
NEIGHBOURS_MAX: Final = 12
"""Neighbours a node keeps in the mesh."""

HAVE_SHARDS: Final = 16
"""Shards of have records in the directory, by the first bits of the peer's digest."""

HEAD_RESIGN_SECONDS: Final = 40.0
"""How often a publisher signs its head again."""

HEAD_VALIDITY_SECONDS: Final = 300.0
"""How long a head is valid after it was signed."""

RECORD_VALIDITY_SECONDS: Final = 120.0
"""Expiry given to directory records."""

DHT_EXPIRY_SECONDS_MAX: Final = 300.0
"""The validator refuses records that expire later than this from now."""

DHT_SLOT_SECONDS: Final = 600.0
"""Directory keys carry the number of this slot; readers ask this slot and the last."""

CLOCK_OFFSET_SECONDS_MAX: Final = 3.0
"""Beyond this the node corrects its directory time and warns (hivemind's own limit)."""

REQUEST_OPEN_SECONDS_MAX: Final = 10.0
READ_STALL_SECONDS_MAX: Final = 20.0
WRITE_STALL_SECONDS_MAX: Final = 60.0
DIRECTORY_CALL_SECONDS_MAX: Final = 15.0
"""Deadlines of single network steps (measured faults show EOF only after 36 s)."""

RETRY_SECONDS_MIN: Final = 0.5
RETRY_SECONDS_MAX: Final = 15.0
"""Back-off between tries, doubled and jittered."""

SERVED_REQUESTS_MAX: Final = 32
"""Requests served at once; further ones wait their turn."""

SKIP_LADDER: Final = (8, 64)
"""Spans, in versions, of the skip patches a publisher makes."""

ANCHOR_INTERVAL_DEFAULT: Final = 50
"""Versions between anchors when the descriptor does not say."""

SPOOL_RATIO_MAX: Final = 0.10
"""Changes waiting for an engine are kept as records up to this share of the model."""
