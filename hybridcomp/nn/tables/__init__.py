"""Embeddings of any size, cut over ranks, with rows on the host and a cache, dimension ``embed``.

host_rows  rows and optimizer states in host memory or mapped files
slots      the cache of rows on the device: eviction, prefetch, write-back
owners     exchange of ids, rows and gradients with the ranks that own the rows
making     settings of a table, checked on all ranks
embedding  the module
row_gradients  gradients at the owners, until a step takes them
optimizer  SGD, Adagrad and SparseAdam of the rows that were touched
saved      checkpoints for any number of ranks
figures    hits and moved rows in the session's reports
"""

from __future__ import annotations

from hybridcomp.nn.tables.embedding import CachedEmbedding
from hybridcomp.nn.tables.ngrams import ngram_keys
from hybridcomp.nn.tables.optimizer import RowOptimizer
from hybridcomp.nn.tables.slots import CacheFigures

#: for the support matrix
COVERS = ("embed",)

__all__ = ["COVERS", "CacheFigures", "CachedEmbedding", "RowOptimizer", "ngram_keys"]
