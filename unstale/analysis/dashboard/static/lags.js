// Lags by name. The last one stands for all larger ones.

export const LAST_LAG = 5;
export const lagName = (lag) => (lag === LAST_LAG ? `lag ${LAST_LAG} or more` : `lag ${lag}`);
