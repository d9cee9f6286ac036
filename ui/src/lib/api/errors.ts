/** A refusal by the daemon, or its absence. The code decides the words; the message is the detail. */
export class ApiError extends Error {
  constructor(
    readonly code: string,
    message: string,
    readonly status: number,
  ) {
    super(message);
    this.name = 'ApiError';
  }

  /** No answer at all: the daemon is not running or not reachable. */
  static unreachable(cause: unknown): ApiError {
    return new ApiError('unreachable', cause instanceof Error ? cause.message : String(cause), 0);
  }

  /** Reads both `{error: {code, message}}` and the OpenAI form, whose `code` may be null. */
  static async from(response: Response): Promise<ApiError> {
    const text = await response.text().catch(() => '');
    try {
      const { error } = JSON.parse(text) as {
        error?: { code?: string | null; type?: string; message?: string };
      };
      if (error) {
        const code = error.code ?? error.type ?? `http_${response.status}`;
        return new ApiError(code, error.message ?? '', response.status);
      }
    } catch {
      // Not JSON: a proxy or another program answered.
    }
    return new ApiError(`http_${response.status}`, text.slice(0, 200), response.status);
  }
}
