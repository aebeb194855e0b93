"""open_clip's own trainer with an estimator in place of its loss.

``python -m compopt.integrations.open_clip --estimator sogclr --index shards.json -- <flags of open_clip>`` runs
open_clip's command line. Names in ``open_clip_train.main`` are wrapped while it runs; no file of open_clip is edited.
Both of its forms are known: the released one (3.3.0: tuples, ``create_loss``) and the rebuilt main branch
(dictionaries, ``create_task``).

1. :mod:`~compopt.integrations.open_clip.options`, :mod:`~compopt.integrations.open_clip.flags`: the estimator.
2. :mod:`~compopt.integrations.open_clip.seams`: where open_clip is open, and what it is asked for in vain.
3. :mod:`~compopt.integrations.open_clip.run`: one training run, what is done at each seam.
4. :mod:`~compopt.integrations.open_clip.pipeline`: the row of each sample, from the reader to the loop.
5. :mod:`~compopt.integrations.open_clip.window`: the loss of an update, however many batches it has.
6. :mod:`~compopt.integrations.open_clip.rows`: rows beside open_clip's checkpoints.
"""
