"""The adapter for vLLM: patches land in its live weights between two scheduler steps, all or nothing.

Two processes take part. The node's side (:mod:`pulsenet.serving.vllm.engine`) needs neither torch nor vLLM; it speaks
vLLM's control routes over loopback and passes weights through shared memory. The other side runs in every worker of
vLLM (:mod:`pulsenet.serving.vllm.worker`), where the entry point of :mod:`pulsenet.serving.vllm.plugin` put it.
"""
