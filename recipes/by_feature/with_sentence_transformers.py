"""Text retrieval with the trainer of sentence-transformers, for any number of processes, precision and accumulation.

python -m recipes.by_feature.with_sentence_transformers
torchrun --nproc_per_node 2 -m recipes.by_feature.with_sentence_transformers --batch-size 16
"""

from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from transformers import PrinterCallback

import compopt
from compopt.integrations.sentence_transformers import EstimatorCallback, EstimatorLoss, add_index
from recipes import models, stopping, text
from recipes.minimal import arguments


def data_and_model(limit=None, wordnet=None):
    """Return training pairs (anchor, positive), an evaluator, and the encoder; replace them by yours."""
    pairs = text.load(wordnet, limit=limit)
    columns = {"anchor": pairs.queries, "positive": pairs.documents}
    train = Dataset.from_dict({name: [texts[at] for at in pairs.train] for name, texts in columns.items()})
    queries, documents = ({str(at): texts[at] for at in pairs.test} for texts in (pairs.queries, pairs.documents))
    evaluator = Retrieval(queries, documents, {each: {each} for each in queries}, name="test")
    return train, evaluator, text.small_model(text.tokenizer_of([*train["anchor"], *train["positive"]]))


class Retrieval(InformationRetrievalEvaluator):
    def __call__(self, model, output_path=None, epoch=-1, steps=-1):
        found = super().__call__(models.finite(model), output_path, epoch, steps)
        if output_path is not None:  # process 0
            print(f"epoch {epoch:.0f}: accuracy {100 * found['test_cosine_accuracy@1']:.1f} %")
        return found


def main(argv=None):
    parser = arguments(__doc__, "runs/with_sentence_transformers")
    parser.set_defaults(batch_size=32)
    parser.add_argument("--wordnet", type=Path, help="folder of WordNet's data.noun and the others; else docstrings")
    args = parser.parse_args(argv)
    settings = SentenceTransformerTrainingArguments(
        args.output, num_train_epochs=args.epochs, per_device_train_batch_size=args.batch_size,
        lr_scheduler_type="cosine", warmup_steps=0.75, eval_strategy="epoch", save_strategy="epoch", save_total_limit=2,
        dataloader_drop_last=True, report_to="none", disable_tqdm=True, use_cpu=compopt.accelerator.available() is None,
    )  # fmt: skip
    settings.learning_rate = 0.001 * (args.batch_size * settings.world_size) ** 0.5  # tuned for a small transformer
    torch.manual_seed(0)
    train, evaluator, model = data_and_model(args.limit, args.wordnet)
    est = compopt.recommended(64, directions="forward", candidates=None)  # DCL, for queries: see docs/which.md
    trainer = SentenceTransformerTrainer(
        model, settings, add_index(train, positives="positive"), loss=EstimatorLoss(model, est), evaluator=evaluator
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(EstimatorCallback(est, trainer))  # steps, and its state in each checkpoint
    trainer.add_callback(stopping.StopAfter(args.stop_after))
    trainer.train(resume_from_checkpoint=args.resume)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
