/** Offers text or bytes as a file, by the browser's own way of saving. */
export function saveFile(name: string, content: Blob): void {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(content);
  link.download = name;
  link.click();
  // The download has taken hold of the content only after the click is over.
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
