"""Other engines on the same work: transformers in this process, vLLM and llama.cpp with the Python of their environments.

A peer takes a job and gives a result, as dictionaries that pass through JSON files.

Job: model (folder or hub id; a GGUF file for llama.cpp), prompts (lists of token ids, equally long), num_tokens (decoded per
sequence), threads, dtype (float32 or bfloat16), temperature (0: greedy). Optional: revision, kv_gib (size of the cache),
random_cache (transformers: a cache of random numbers instead of a prefill).
Result: step_seconds (what lies between two tokens of all sequences, prefill not among it), prefill_seconds, token_ids, versions,
threads.
"""
