// Stands in for CUDA's own nvrtc.h, whose package the build would otherwise need. cudnn_frontend
// includes that header for engines that jqconv never uses; these two types are all it takes there.
#ifndef JQCONV_STUBS_NVRTC_H_
#define JQCONV_STUBS_NVRTC_H_

typedef struct _nvrtcProgram* nvrtcProgram;

typedef enum {
  NVRTC_SUCCESS = 0,
  NVRTC_ERROR_INTERNAL_ERROR = 11,
} nvrtcResult;

#endif  // JQCONV_STUBS_NVRTC_H_
