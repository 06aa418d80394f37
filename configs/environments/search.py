"""Search in local documents by BM25, the tool of configs/search_qa_qwen2.5_3b.yaml.

    pip install bm25s
    python configs/environments/search.py documents.jsonl --output data/search_qa/index

builds the index. Each line of documents.jsonl is a document: {"title": ..., "text": ...}. The title may be missing.
"""

import argparse
import functools
import json
from pathlib import Path

try:
    import bm25s
except ImportError:
    raise ImportError("the search tool needs the package bm25s; install it: pip install bm25s") from None

MAX_COUNT = 10  # documents in a result
MAX_CHARS = 600  # of each


class Search:
    """An environment without state, whose method is a tool. environment.options has the folder of the index."""

    def __init__(self, index: str):
        self._index = index

    def search(self, query: str, count: int = 3) -> str:
        """Search for documents that have words of the query. Return the best ones.

        Args:
            query: words to search for
            count: number of documents
        """
        documents, retriever = load_index(self._index)
        words = split_words([query])
        if not words[0]:
            return "Error: the query has no words to search for."
        count = max(1, min(count, MAX_COUNT, len(documents)))
        found, scores = retriever.retrieve(words, k=count, show_progress=False, n_threads=1)
        best = [documents[number] for number, score in zip(found[0], scores[0], strict=True) if score > 0]
        shown = [f"[{place}] {text[:MAX_CHARS]}" for place, text in enumerate(best, 1)]
        return "\n\n".join(shown) or "No document matches."


@functools.cache  # once per process
def load_index(folder: str) -> tuple[list[str], bm25s.BM25]:
    """Return the texts of all documents and the index, which stays on the disk until it is used."""
    file = Path(folder) / "documents.json"
    if not file.is_file():
        raise FileNotFoundError(f"no index at {folder}; build it: python {__file__} documents.jsonl --output {folder}")
    return json.loads(file.read_text()), bm25s.BM25.load(folder, mmap=True)


def build_index(source: Path, folder: Path) -> int:
    """Index the documents in a jsonl file. Return their number."""
    documents = []
    for number, line in enumerate(source.open(encoding="utf-8"), 1):
        row = json.loads(line)
        if not isinstance(row.get("text"), str):
            raise ValueError(f'{source}, line {number}: it must be {{"title": ..., "text": ...}}; got {line[:80]}')
        documents.append(f"{row['title']}\n{row['text']}" if row.get("title") else row["text"])
    retriever = bm25s.BM25()
    retriever.index(split_words(documents), show_progress=False)
    folder.mkdir(parents=True, exist_ok=True)
    retriever.save(folder, show_progress=False)
    (folder / "documents.json").write_text(json.dumps(documents))
    return len(documents)


def split_words(texts: list[str]) -> list[list[str]]:
    return bm25s.tokenize(texts, stopwords="en", return_ids=False, show_progress=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build an index of documents for the search tool.")
    parser.add_argument("documents", type=Path, help="a jsonl file with title and text in each line")
    parser.add_argument("--output", type=Path, required=True, help="folder of the index")
    args = parser.parse_args()
    print(f"{args.output}: {build_index(args.documents, args.output)} documents")
