"""A stand-in for NVML, the library of NVIDIA's driver that measures cards, compiled with the functions that we call.

    standing = StandIn(tmp_path)          # tmp_path/libnvidia-ml.so.1, for LD_LIBRARY_PATH
    standing.show("GPU-a", 4096, 70)      # the card GPU-a has 4,096 MiB in use, and is busy 70 % of the time

Types and error codes are those of nvml.h. The cards are in a text file, so a test can change them at any time.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = r"""
#include <stdio.h>
#include <string.h>
#include <unistd.h>
enum { SUCCESS = 0, UNINITIALIZED = 1, NOT_SUPPORTED = 3, NOT_FOUND = 6 };
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned int gpu, memory; } utilization_t;
typedef struct { char uuid[100]; long long used_mb; int utilization; } card_t;
static card_t cards[16];
static int is_ready;

static int read_cards(void) {
    int count = 0;
    FILE *file = fopen(CARDS, "r");
    while (file && count < 16 && fscanf(file, "%99s %lld %d", cards[count].uuid, &cards[count].used_mb,
                                        &cards[count].utilization) == 3) count++;
    if (file) fclose(file);
    return count;
}
int nvmlInit_v2(void) { is_ready = 1; return SUCCESS; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **card) {
    if (!is_ready) return UNINITIALIZED;
    for (int index = 0, count = read_cards(); index < count; index++)
        if (!strcmp(cards[index].uuid, uuid)) { *card = &cards[index]; return SUCCESS; }
    return NOT_FOUND;
}
int nvmlDeviceGetMemoryInfo(void *card, memory_t *memory) {
    card_t *found = card;
    if (found->used_mb == -2) { fclose(fopen(CARDS ".hung", "w")); pause(); }
    if (found->used_mb < 0) return NOT_SUPPORTED;
    memory->total = 141ULL << 30;
    memory->used = (unsigned long long)found->used_mb << 20;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}
int nvmlDeviceGetUtilizationRates(void *card, utilization_t *utilization) {
    card_t *found = card;
    if (found->utilization < 0) return NOT_SUPPORTED;
    utilization->gpu = found->utilization;
    utilization->memory = 99;
    return SUCCESS;
}
"""
HUNG = -2  # as the memory in use: NVML never answers


class StandIn:
    """The library in `folder`, and its cards."""

    def __init__(self, folder: Path):
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("the stand-in for NVML needs a C compiler")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path, self._cards = folder, folder / "libnvidia-ml.so.1", folder / "cards.txt"
        (folder / "nvml.c").write_text(SOURCE)
        define = f'-DCARDS="{self._cards}"'
        command = [compiler, "-shared", "-fPIC", define, "-o", str(self.path), str(folder / "nvml.c")]
        subprocess.run(command, check=True)
        self._shown: dict[str, str] = {}

    def show(self, uuid: str, memory_mb: int, utilization: int) -> None:
        """Show a card with these values from now on. -1 means that NVML does not know the value."""
        self._shown[uuid] = f"{uuid} {memory_mb} {utilization}\n"
        self._write()

    @property
    def is_hung(self) -> bool:
        """Whether a call has been hanging since a card was shown as HUNG."""
        return Path(f"{self._cards}.hung").exists()

    def lose(self, uuid: str) -> None:
        del self._shown[uuid]
        self._write()

    def _write(self) -> None:
        whole = self._cards.with_suffix(".new")
        whole.write_text("".join(self._shown.values()))
        whole.rename(self._cards)
