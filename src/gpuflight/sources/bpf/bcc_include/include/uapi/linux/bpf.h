/* bcc brings its own copy (/virtual/include/bcc/bpf.h) and includes it first. */
