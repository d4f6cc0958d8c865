/* markers.h - the special tokens of the chat formats. */
#ifndef HD_CHAT_MARKERS_H
#define HD_CHAT_MARKERS_H

#define CHAT_BOS           "<｜begin▁of▁sentence｜>"
#define CHAT_EOS           "<｜end▁of▁sentence｜>"
#define CHAT_SYSTEM        "<｜System｜>"
#define CHAT_USER          "<｜User｜>"
#define CHAT_ASSISTANT     "<｜Assistant｜>"
#define CHAT_THINK         "<think>"
#define CHAT_END_THINK     "</think>"
#define CHAT_CALLS_BEGIN   "<｜tool▁calls▁begin｜>"
#define CHAT_CALLS_END     "<｜tool▁calls▁end｜>"
#define CHAT_CALL_BEGIN    "<｜tool▁call▁begin｜>"
#define CHAT_CALL_END      "<｜tool▁call▁end｜>"
#define CHAT_CALL_SEP      "<｜tool▁sep｜>"
#define CHAT_OUTPUTS_BEGIN "<｜tool▁outputs▁begin｜>"
#define CHAT_OUTPUTS_END   "<｜tool▁outputs▁end｜>"
#define CHAT_OUTPUT_BEGIN  "<｜tool▁output▁begin｜>"
#define CHAT_OUTPUT_END    "<｜tool▁output▁end｜>"
#define CHAT_DSML          "｜DSML｜"

#endif
