"""Native DSpark drafts: SGLang's own drafter and verify, with this package's decisions in place of its planner's.

A block draft makes all gamma positions in one forward, so a step drafts 0 or gamma; its budget and the split over the
requests are planned as for every other draft.

On CUDA (read from SGLang 0.5.23, run on a CPU only):

- The budget is on the host before the step drafts, and with it the graph tier of the verify; the lengths are made on
  the device by one launch (kernels.allocate) and stay there: SGLang builds its layout from them without reading them.
  Between plan and launch nothing waits for the device. What an outcome is learnt from (logits, confidence, lengths: R x
  (2 gamma + 1) numbers) is copied behind the step, on its stream, and read once SGLang has the result on the host.
- The budget fills tiers: the cost table has the captured token counts, and the planner knows where a stair ends. It is
  cut to the last one; more requests than the graphs have slots are verified whole, as without this package.
- A step without a draft replays the target's graph at the tier of one token a request and accepts in eager mode, as
  SGLang's own steps do whose draft came from no graph.
- SGLang's relay of confidences, whose arrival each rank asks for itself, decides nothing; the plan goes from the first
  rank to the others over the CPU group, before anything is launched.
- min-p counts where SGLang accepts by its chain sampler; its block-wise rejection
  (SGLANG_OPT_DSV41_BLOCKWISE_REJECTION) ignores it, as without this package.
"""
