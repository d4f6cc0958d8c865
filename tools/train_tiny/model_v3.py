class V3Config: pass
