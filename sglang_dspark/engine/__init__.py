"""The only folder that imports sglang: what turns the decision code into a speculative algorithm of stock SGLang."""
