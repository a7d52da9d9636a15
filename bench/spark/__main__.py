from bench.spark.program import main

main()
