# List sample models for benchmarking
python run_training_benchmark.py --list-models

# Generate distributed benchmark configuration
python run_training_benchmark.py --model bert-base-uncased --distributed --max-gpus 4 --output bert_benchmark.json

# Specify available hardware
python run_training_benchmark.py --model t5-small --hardware cuda rocm --distributed --max-gpus 8
