"""What RequestTable reads of an SGLang request."""

from types import SimpleNamespace


class Request:
    """A greedy request in a slot, of so many prompt tokens, that has said some and may say ``most``."""

    def __init__(self, slot: int, prompt: int = 4, said: int = 1, most: int = 8) -> None:
        self.kv = SimpleNamespace(req_pool_idx=slot)
        self.grammar = self.custom_logit_processor = self.lora_id = None
        self.is_retracted = self.ended = False
        self.origin_input_ids, self.output_ids = [1] * prompt, [1] * said
        self.sampling_params = SimpleNamespace(
            top_k=1,
            logit_bias=None,
            frequency_penalty=0,
            presence_penalty=0,
            repetition_penalty=1.0,
            min_new_tokens=0,
            max_new_tokens=most,
        )

    def finished(self) -> bool:
        return self.ended
