"""Data for training: records from files and datasets, made into tokens, mixed, packed and resumable.

with open_loaders(config.data, training=config.training, tokenizer=tokenizer, seed=0) as loaders:
    for batch in loaders.train:
        ...
"""

from forge.data.corpus import Corpus, Drawn, IndexedCorpus, Pass, StreamCorpus
from forge.data.files import Record
from forge.data.formats import Conversation, Layout, RecordFormats, convert, detect
from forge.data.loader import BatchCount, BatchLoader
from forge.data.opening import Loaders, open_corpus, open_indexed_corpus, open_loaders
from forge.data.packing import Packer
from forge.data.preferences import PREFERENCES, PreferenceEncoder
from forge.data.samples import Counters, Encoder, SampleEncoder, Tokenizer
from forge.data.sources import IndexedFiles, IndexedSource, StreamSource, open_indexed, open_stream

__all__ = [
    "PREFERENCES",
    "BatchCount",
    "BatchLoader",
    "Conversation",
    "Corpus",
    "Counters",
    "Drawn",
    "Encoder",
    "IndexedCorpus",
    "IndexedFiles",
    "IndexedSource",
    "Layout",
    "Loaders",
    "Packer",
    "Pass",
    "PreferenceEncoder",
    "Record",
    "RecordFormats",
    "SampleEncoder",
    "StreamCorpus",
    "StreamSource",
    "Tokenizer",
    "convert",
    "detect",
    "open_corpus",
    "open_indexed",
    "open_indexed_corpus",
    "open_loaders",
    "open_stream",
]
