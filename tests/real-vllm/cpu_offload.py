"""CPU offloading for vLLM's CPU backend. vLLM's own copies need a GPU; connector, scheduler, manager and events are
vLLM's.
"""

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class CopyingSpec(CPUOffloadingSpec):
    def get_worker(self, kv_caches):
        if self._worker is None:
            assert self.blocks_per_chunk == 1
            self._worker = CopyingWorker(tensor.tensor for tensor in kv_caches.tensors)
        return self._worker


class CopyingWorker(OffloadingWorker):
    """Copies blocks when their job is submitted."""

    def __init__(self, tensors):
        self.tensors = list(tensors)
        self.chunks = {}
        self.finished = []

    def submit_store(self, job_id, src_spec, dst_spec):
        for block, chunk in zip(src_spec.block_ids, dst_spec.block_ids, strict=True):
            self.chunks[int(chunk)] = [tensor[int(block)].clone() for tensor in self.tensors]
        return self.finish(job_id)

    def submit_load(self, job_id, src_spec, dst_spec):
        for chunk, block in zip(src_spec.block_ids, dst_spec.block_ids, strict=True):
            for tensor, copy in zip(self.tensors, self.chunks[int(chunk)], strict=True):
                tensor[int(block)] = copy
        return self.finish(job_id)

    def finish(self, job_id):
        self.finished.append(TransferResult(job_id=job_id, success=True))
        return True

    def get_finished(self):
        finished, self.finished = self.finished, []
        return finished

    def wait(self, job_ids):
        pass
